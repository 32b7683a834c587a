"""SandboxSpec as a value: frozen, hashed by content, the same after its journey as plain data."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rl.errors import UserInputError
from k3rl.sandboxes.spec import Capability, SandboxLimits, SandboxSpec
from k3rl.types import decode, encode, from_plain, to_plain

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
VARIABLES = st.dictionaries(TEXT.filter(lambda name: name and "=" not in name), TEXT, max_size=6)
PROGRAMS = st.text(st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1)
LIMITS = st.builds(
    SandboxLimits, **dict.fromkeys(SandboxLimits.__slots__, st.integers(1, (1 << 62) - 1))
)
SPECS = st.builds(
    SandboxSpec,
    limits=LIMITS,
    environment=VARIABLES,
    executables=st.lists(PROGRAMS, max_size=3).map(tuple),
    required=st.lists(st.sampled_from(Capability), max_size=4).map(tuple),
)


@given(SPECS, st.randoms())
def test_a_spec_survives_its_journey_and_keeps_its_digest(spec, random):
    for back in (
        from_plain(SandboxSpec, json.loads(json.dumps(to_plain(spec)))),
        decode(SandboxSpec, encode(spec)),
    ):
        assert back == spec
        assert (back.digest, hash(back)) == (spec.digest, hash(spec))
    variables = list(spec.environment.items())
    random.shuffle(variables)
    shuffled = replace(spec, environment=dict(variables))
    assert shuffled == spec
    assert shuffled.digest == spec.digest
    assert replace(spec, environment={**spec.environment, "one more": ""}).digest != spec.digest


def test_a_spec_cannot_be_changed():
    variables = {"A": "b"}
    spec = SandboxSpec(environment=variables)
    before = spec.digest
    variables["C"] = "d"
    assert dict(spec.environment) == {"A": "b"}
    with pytest.raises(TypeError):
        spec.environment["C"] = "d"
    with pytest.raises(FrozenInstanceError):
        spec.executables = ()
    with pytest.raises(FrozenInstanceError):
        spec.limits.cpu_s = 1
    assert spec.digest == before


@pytest.mark.parametrize(
    ("plain", "field"),
    [
        ({"enviroment": {}}, "enviroment"),
        ({"limits": {"cpu": 3}}, r"limits\.cpu"),
        ({"limits": {"cpu_s": 0}}, r"limits.*cpu_s"),
        ({"limits": {"cpu_s": -1}}, r"limits.*cpu_s"),
        ({"limits": {"tmp_bytes": 1 << 70}}, r"limits.*tmp_bytes"),
        ({"limits": {"tmp_bytes": "many"}}, r"limits\.tmp_bytes"),
        ({"limits": 3}, "limits"),
        ({"environment": {"A": 1}}, r"environment\.A"),
        ({"environment": {"A=B": ""}}, "environment.*A=B"),
        ({"environment": {"": "x"}}, "environment"),
        ({"environment": {"A": "x\0"}}, "environment.*'A'"),
        ({"executables": ["sh", ""]}, "executables"),
        ({"executables": ["../sh"]}, "executables"),
        ({"executables": "sh"}, "executables"),
        ({"required": ["no_such_capability"]}, r"required\.0"),
        ([], "SandboxSpec"),
    ],
)
def test_what_does_not_fit_is_named(plain, field):
    with pytest.raises(UserInputError, match=field):
        from_plain(SandboxSpec, plain)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SandboxLimits(max_processes=0), "max_processes"),
        (lambda: SandboxSpec(environment={"A=B": ""}), "environment"),
        (lambda: SandboxSpec(executables=("a\0b",)), "executables"),
    ],
)
def test_what_does_not_fit_is_no_spec_at_all(make, field):
    with pytest.raises(UserInputError, match=field):
        make()
