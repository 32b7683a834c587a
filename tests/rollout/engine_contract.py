"""The RolloutEngine contract as plain async functions over a factory of fresh engines."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from k3rl.errors import EngineError, WeightsError
from k3rl.rollout.engine import EngineCapability, RolloutEngine, SamplingLaw
from k3rl.types import FinishReason

CASES = []


def case(function):
    CASES.append(function)
    return function


async def collect(engine, request, until=None):
    """Deltas of a request; with `until`, aborts after that many tokens."""
    deltas, count = [], 0
    async for delta in engine.generate(request):
        deltas.append(delta)
        count += len(delta.token_ids)
        if until is not None and count >= until:
            await engine.abort(request.key.id)
    return deltas


def ids_of(deltas):
    return np.concatenate([delta.token_ids for delta in deltas]).tolist()


def continued(request, deltas):
    return replace(
        request, token_ids=np.concatenate([request.token_ids, ids_of(deltas)]).astype("i4")
    )


@case
async def fulfils_the_protocol(make, requests):
    engine = make()
    assert isinstance(engine, RolloutEngine)
    assert engine.capabilities <= set(EngineCapability)


@case
async def ends_with_one_finish_reason_at_a_stop_id(make, requests):
    for request in requests:
        deltas = await collect(make(), request)
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.STOP
        ids = ids_of(deltas)
        assert ids[-1] in request.stop_ids
        assert not set(ids[:-1]) & set(request.stop_ids)


@case
async def logprobs_are_those_of_the_tokens(make, requests):
    for delta in await collect(make(), requests[0]):
        assert len(delta.rollout_logprobs) == len(delta.token_ids)
        assert np.all(np.isfinite(delta.rollout_logprobs))
        assert np.all(delta.rollout_logprobs <= 0)
        assert delta.state_version <= delta.policy_version


@case
async def stops_at_max_new_tokens(make, requests):
    whole = ids_of(await collect(make(), requests[0]))
    for limit in (1, 2, len(whole) - 1):
        deltas = await collect(make(), replace(requests[0], max_new_tokens=limit))
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert ids_of(deltas) == whole[:limit]


@case
async def an_aborted_turn_continues_the_same_in_a_fresh_engine(make, requests):
    for request in requests:
        whole = ids_of(await collect(make(), request))
        first = await collect(make(), request, until=1)
        assert first[-1].finish_reason is FinishReason.ABORT
        said = ids_of(first)
        assert 0 < len(said) < len(whole)
        rest = await collect(make(), continued(request, first))
        assert said + ids_of(rest) == whole


@case
async def batch_composition_changes_no_token(make, requests):
    engine = make()
    alone = [ids_of(await collect(make(), request)) for request in requests]
    together = await asyncio.gather(*(collect(engine, request) for request in requests))
    if EngineCapability.BATCH_INVARIANT in engine.capabilities:
        assert [ids_of(deltas) for deltas in together] == alone


@case
async def pause_holds_requests_and_resume_lets_them_go_on(make, requests):
    engine = make()
    await engine.pause()
    task = asyncio.create_task(collect(engine, requests[0]))
    await asyncio.sleep(0.05)
    assert not task.done()
    await engine.resume()
    assert ids_of(await task) == ids_of(await collect(make(), requests[0]))


@case
async def one_trajectory_has_one_request(make, requests):
    engine = make()
    await engine.pause()
    first = asyncio.create_task(collect(engine, requests[0]))
    await asyncio.sleep(0.01)
    with pytest.raises(EngineError, match="already"):
        await collect(engine, requests[0])
    await engine.resume()
    assert (await first)[-1].finish_reason is FinishReason.STOP


@case
async def abort_of_an_unknown_trajectory_is_fine(make, requests):
    await make().abort("0" * 32)


@case
async def a_law_that_the_learner_cannot_recompute_is_refused(make, requests):
    with pytest.raises(EngineError):
        await collect(make(), replace(requests[0], law=SamplingLaw(top_p=0.5)))


@case
async def missing_state_export_is_an_error_not_an_empty_state(make, requests):
    engine, key = make(), requests[0].key
    if EngineCapability.EXPORTS_STATE in engine.capabilities:
        with pytest.raises(EngineError, match=key.id):
            await engine.export_state(key.id)
        with pytest.raises(EngineError, match="state"):
            await engine.import_state(key.id, b"")
    else:
        with pytest.raises(EngineError, match="exports_state"):
            await engine.export_state(key.id)
        with pytest.raises(EngineError, match="exports_state"):
            await engine.import_state(key.id, b"")


@case
async def a_turn_goes_on_the_same_from_an_imported_state(make, requests):
    if EngineCapability.EXPORTS_STATE not in make().capabilities:
        return
    for request in requests:
        whole = ids_of(await collect(make(), request))
        first, engine = make(), make()
        begun = await collect(first, request, until=1)
        await engine.import_state(request.key.id, await first.export_state(request.key.id))
        rest = await collect(engine, continued(request, begun))
        assert ids_of(begun) + ids_of(rest) == whole
        with pytest.raises(EngineError, match=request.key.id):
            await engine.import_state("0" * 32, await first.export_state(request.key.id))


@case
async def a_bad_manifest_changes_no_version(make, requests):
    engine = make()
    before = engine.policy_version
    with pytest.raises((EngineError, WeightsError)):
        await engine.apply({"policy_version": -1})
    assert engine.policy_version == before


@case
async def closing_ends_running_requests(make, requests):
    engine = make()
    await engine.pause()
    task = asyncio.create_task(collect(engine, requests[0]))
    await asyncio.sleep(0.01)
    await engine.aclose()
    assert (await asyncio.wait_for(task, 5))[-1].finish_reason is FinishReason.ABORT
