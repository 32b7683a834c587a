"""The checker sees every planted fault, and sees nothing in a sound environment."""

import asyncio
import json

import pytest

from k3rl.blobs import BlobStore
from k3rl.envs.checker.check import BAD, Verdict
from k3rl.envs.checker.suite import CAN_BE_MADE, CHECKS, check_env
from k3rl.envs.registry import Registry
from k3rl.errors import UserInputError
from k3rl.sandboxes.factory import open_backend
from tests.envs.broken_envs import FAULTS, HERE, ID, SOUND_POLICIES, Fault, Sound, all_numbers

pytestmark = pytest.mark.sandbox
NAMES = [check.name for check in CHECKS]


def findings_of(tmp_path, fault, *names, num_tasks=4):
    """Verdicts by check of an environment that only its own registry knows."""
    known = Registry(group=None)
    changed = {**SOUND_POLICIES, **fault.policies}
    policies = {name: policy for name, policy in changed.items() if policy}
    where = f"{HERE}:{fault.cls.__name__}"
    known.register(ID, where, policies=policies, cheats={"all numbers": all_numbers})
    checks = [check for check in CHECKS if not names or check.name in names]

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        try:
            return await check_env(
                ID, backend, tmp_path, num_tasks=num_tasks, checks=checks, among=known
            )
        finally:
            await backend.aclose()

    return {found.check: found for found in asyncio.run(main())}


def test_the_sound_one_passes_every_check(tmp_path):
    findings = findings_of(tmp_path, Fault(Sound, ""))
    assert list(findings) == NAMES
    assert {each.check: each.detail for each in findings.values() if each.verdict != "passed"} == {}
    assert all(each.detail for each in findings.values())
    assert "change from run to run" in findings["outputs stay apart"].detail


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_its_check(tmp_path, fault):
    found = findings_of(tmp_path, fault, fault.check)[fault.check]
    assert found.verdict is Verdict.BROKEN, found
    assert found.detail
    assert "\n" not in found.detail


def test_every_check_has_a_fault():
    assert {fault.check for fault in FAULTS} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_by_no_other_check(tmp_path, fault):
    findings = findings_of(tmp_path, fault)
    bad = {name for name, found in findings.items() if found.verdict in BAD}
    assert fault.check in bad
    assert "*" in fault.also or bad <= {fault.check, *fault.also}, {
        name: findings[name].detail for name in bad
    }


@pytest.mark.parametrize("name", ["random", "null"])
def test_policies_that_are_not_declared_are_told(tmp_path, name):
    check = {"random": "random is below the oracle", "null": "null gets nothing"}[name]
    fault = Fault(Sound, check, policies={name: None})
    found = findings_of(tmp_path, fault, check)[check]
    assert (found.verdict, found.detail) == (Verdict.UNDECLARED, f"no policy {name!r}")


def test_what_cannot_be_made_is_one_finding(tmp_path):
    fault = Fault(type("NoSuchClass", (), {}), "")
    (found,) = findings_of(tmp_path, fault).values()
    assert (found.check, found.verdict) == (CAN_BE_MADE, Verdict.FAILED)
    assert f"cannot load {HERE}:NoSuchClass" in found.detail


def test_no_tasks_is_no_check(tmp_path):
    with pytest.raises(UserInputError, match="num_tasks 0"):
        findings_of(tmp_path, Fault(Sound, ""), num_tasks=0)


def test_nondeterminism_that_is_declared_is_not_asked_about(tmp_path):
    known = Registry(group=None)
    known.register(ID, f"{HERE}:TellsTheTime", policies=SOUND_POLICIES, nondeterministic=True)
    names = {"plays are deterministic", "other processes agree", "grading is repeatable"}

    async def main():
        backend = open_backend("bwrap", BlobStore(tmp_path / "blobs"), tmp_path / "scratch")
        checks = [check for check in CHECKS if check.name in names]
        found = await check_env(ID, backend, tmp_path, checks=checks, among=known)
        await backend.aclose()
        return found

    assert {found.verdict for found in asyncio.run(main())} == {Verdict.UNDECLARED}
    assert json.dumps([check.group for check in CHECKS])
