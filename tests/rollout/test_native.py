"""The native engine beyond the contract: the sampling rule, kept states, versions in flight."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest
import torch

from k3rl.blobs import BlobStore
from k3rl.errors import EngineError, WeightsError
from k3rl.model.model import K3Model
from k3rl.rollout.decode import EXTEND_TOKENS, _batches
from k3rl.rollout.draws import uniforms
from k3rl.rollout.engine import SamplingLaw
from k3rl.rollout.native import AWAY_S, NO_WEIGHTS
from k3rl.types import FinishReason
from tests.rollout.engine_contract import collect, continued, ids_of
from tests.rollout.native_helpers import (
    CONFIG,
    grown,
    law_of,
    make_engine,
    make_model,
    make_request,
    published,
)

MODELS = {"random": make_model(), "peaked": make_model(2, sharpness=4.0)}
TOLERANCE = 2e-4
"""Float32 agreement of engine and learner, design invariant 4."""


@pytest.fixture
def blobs(tmp_path):
    return BlobStore(tmp_path / "blobs")


def logprobs_of(deltas):
    return np.concatenate([delta.rollout_logprobs for delta in deltas])


def versions_of(deltas):
    return [(d.policy_version, d.state_version) for d in deltas for _ in d.token_ids]


def check_logprobs(model, request, deltas):
    """Every token's log-prob is that of one pass over the whole context; returns the worst."""
    ids = ids_of(deltas)
    context = np.concatenate([request.token_ids, ids]).astype(np.int32)
    law = law_of(model, context)[len(request.token_ids) - 1 : -1]
    expected = law.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy()
    worst = np.abs(expected - logprobs_of(deltas)).max()
    assert worst <= TOLERANCE
    return worst


async def play_turns(engine, request, num_turns, num_result_tokens):
    """Turns with random tool results between them; the requests made and what each gave."""
    played = []
    for turn in range(num_turns):
        deltas = await collect(engine, request)
        played.append((request, deltas))
        result = np.random.default_rng(turn).integers(0, CONFIG.vocab_size, num_result_tokens)
        request = grown(request, ids_of(deltas), result)
        request = dataclasses.replace(request, turn_start=len(request.token_ids))
    return played


@pytest.mark.parametrize("name", MODELS)
def test_tokens_follow_the_rule_and_logprobs_are_those_of_a_whole_pass(blobs, name):
    model = MODELS[name]

    async def go():
        engine = make_engine(blobs, model)
        requests = [make_request(n, 15 + 3 * n, seed=7) for n in range(12)]
        for request, deltas in zip(
            requests, await asyncio.gather(*(collect(engine, r) for r in requests)), strict=True
        ):
            check_logprobs(model, request, deltas)
            start, ids = len(request.token_ids), ids_of(deltas)
            law = law_of(model, np.concatenate([request.token_ids, ids]))[start - 1 : -1]
            cdf = law.exp().cumsum(-1).numpy()
            numbers = uniforms(7, request.key.id, start, len(ids))
            assert ids == [
                np.searchsorted(row, u, side="right") for row, u in zip(cdf, numbers, strict=True)
            ]

    asyncio.run(go())


def test_a_split_a_pause_and_a_fresh_engine_change_no_token(blobs):
    async def go():
        request = make_request(5, max_new=60)
        request = dataclasses.replace(request, stop_ids=(0,))
        whole = ids_of(await collect(make_engine(blobs, MODELS["random"]), request))
        assert len(whole) > 20
        for fresh in (False, True):
            engine, said, rest = make_engine(blobs, MODELS["random"]), [], request
            while len(said) < len(whole):
                await engine.pause()
                task = asyncio.create_task(collect(engine, rest, until=5))
                await asyncio.sleep(0)
                await engine.resume()
                deltas = await task
                said += ids_of(deltas)
                rest = grown(request, said)
                rest = dataclasses.replace(rest, max_new_tokens=60 - len(said))
                if fresh:
                    engine = make_engine(blobs, MODELS["random"])
            assert said == whole

    asyncio.run(go())


def test_a_tool_result_costs_only_its_own_tokens(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"])
        played = await play_turns(engine, make_request(1, length=30), 4, 9)
        assert engine.stats.num_prefills == 1
        assert engine.stats.prefill_tokens == 30
        assert engine.stats.num_cache_hits == 3
        # The last sampled token of a turn is read with the result that follows it.
        assert engine.stats.extend_tokens == 30 + 3 * (9 + 1)
        assert engine.stats.num_refreshes == 0
        for request, deltas in played:
            check_logprobs(MODELS["random"], request, deltas)

    asyncio.run(go())


def test_contexts_that_come_while_others_are_sampled_are_read_together(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"], extend_every=16)
        running = dataclasses.replace(make_request(0, max_new=60), stop_ids=())
        task = asyncio.create_task(collect(engine, running))
        while not engine.stats.num_steps:  # noqa: ASYNC110
            await asyncio.sleep(0)
        joining = [asyncio.create_task(collect(engine, make_request(1)))]
        await asyncio.sleep(0.002)
        joining += [asyncio.create_task(collect(engine, make_request(n))) for n in range(2, 6)]
        for number, deltas in enumerate(await asyncio.gather(*joining), start=1):
            check_logprobs(MODELS["random"], make_request(number), deltas)
        check_logprobs(MODELS["random"], running, await task)
        assert (engine.stats.num_prefills, engine.stats.num_extends) == (6, 2)

    asyncio.run(go())


def test_iterations_wait_for_trajectories_in_their_tools_while_few_run(blobs):
    async def seconds(engine, request):
        began = time.monotonic()
        await collect(engine, request)
        return time.monotonic() - began

    async def go():
        engine = make_engine(blobs, MODELS["random"], linger_s=0.5)
        every_id = tuple(range(CONFIG.vocab_size))
        turns = [dataclasses.replace(make_request(n), stop_ids=every_id) for n in range(3)]
        await asyncio.gather(*(collect(engine, turn) for turn in turns))
        alone = dataclasses.replace(make_request(9, max_new=3), stop_ids=())
        assert await seconds(engine, alone) >= 0.5
        await asyncio.sleep(AWAY_S)
        assert await seconds(engine, dataclasses.replace(alone, key=make_request(8).key)) < 0.5

    asyncio.run(go())


def test_lanes_are_extended_by_length_within_a_bound():
    lengths = np.array([900, 5, 4000, 7, 5000, 6, 900, 900, 900, 900])
    places = np.argsort(lengths, kind="stable")
    batches = list(_batches(places, lengths))
    assert np.concatenate(batches).tolist() == places.tolist()
    sizes = [len(batch) * lengths[batch].max() for batch in batches]
    assert [len(batch) for batch in batches] == [4, 4, 1, 1]
    assert all(size <= EXTEND_TOKENS for size in sizes[:-1])


def test_another_context_of_a_known_trajectory_is_read_afresh(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"])
        request = make_request(1)
        await collect(engine, request)
        other = make_request(2)
        other = dataclasses.replace(other, key=request.key)
        deltas = await collect(engine, other)
        assert (engine.stats.num_prefills, engine.stats.num_cache_hits) == (2, 0)
        check_logprobs(MODELS["random"], other, deltas)
        # The very context it has read all but the last token of: nothing is read again but that.
        again = await collect(engine, grown(other, ids_of(deltas)))
        assert engine.stats.num_cache_hits == 1
        check_logprobs(MODELS["random"], grown(other, ids_of(deltas)), again)

    asyncio.run(go())


def test_few_lanes_serve_many_trajectories_in_order_and_the_idle_lose_theirs(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"], num_slots=3)
        requests = [make_request(n) for n in range(10)]
        both = []
        for _ in range(2):
            results = await asyncio.gather(*(collect(engine, r) for r in requests))
            both.append([ids_of(deltas) for deltas in results])
            for request, deltas in zip(requests, results, strict=True):
                check_logprobs(MODELS["random"], request, deltas)
        assert both[0] == both[1]
        assert engine.stats.num_prefills == 20

    asyncio.run(go())


async def apply_midway(engine, request, manifest, after):
    """Collect a request, with the manifest applied once `after` tokens were given out."""
    deltas, count = [], 0
    async for delta in engine.generate(request):
        deltas.append(delta)
        count += len(delta.token_ids)
        if manifest and count >= after:
            assert await engine.apply(manifest) == manifest["policy_version"]
            manifest = None
    return deltas


def test_a_version_in_flight_refreshes_states_and_changes_no_sampled_id(blobs):
    old, new = make_model(1), make_model(9)
    manifest = published(blobs, new, 4)

    async def go():
        request = dataclasses.replace(make_request(3, max_new=64), stop_ids=())
        before = ids_of(await collect(make_engine(blobs, old), request))
        engine = make_engine(blobs, old)
        deltas = await apply_midway(engine, request, manifest, 20)
        ids, versions = ids_of(deltas), versions_of(deltas)
        assert len(ids) == 64
        cut = versions.index((4, 4))
        assert cut >= 20
        assert versions == [(0, 0)] * cut + [(4, 4)] * (64 - cut)
        assert ids[:cut] == before[:cut]
        assert ids[cut:] != before[cut:]
        assert (engine.stats.num_refreshes, engine.stats.num_prefills) == (1, 1)
        assert engine.stats.refresh_tokens == 20 + cut
        first = [delta for delta in deltas if delta.policy_version == 0]
        check_logprobs(old, request, first)
        check_logprobs(new, continued(request, first), deltas[len(first) :])

    asyncio.run(go())


def test_a_state_kept_from_an_older_version_is_read_again(blobs):
    new = make_model(9)
    manifest = published(blobs, new, 1)

    async def go():
        engine = make_engine(blobs, MODELS["random"])
        request = make_request(4)
        deltas = await collect(engine, request)
        await engine.apply(manifest)
        following = grown(request, ids_of(deltas), [5, 6])
        check_logprobs(new, following, await collect(engine, following))
        assert (engine.stats.num_refreshes, engine.stats.num_cache_hits) == (1, 0)

    asyncio.run(go())


def test_tokens_sampled_but_not_given_out_keep_their_version(blobs):
    """Deltas are longer than what was sampled when the version comes."""
    manifest = published(blobs, make_model(9), 1)

    async def go():
        engine = make_engine(blobs, MODELS["random"], delta_tokens=1000)
        request = dataclasses.replace(make_request(3, max_new=40), stop_ids=())
        task = asyncio.create_task(collect(engine, request))
        while engine.stats.decoded_tokens < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
        count = engine.stats.decoded_tokens
        await engine.apply(manifest)
        deltas = await task
        assert [len(d.token_ids) for d in deltas] == [count, 40 - count]
        assert [d.policy_version for d in deltas] == [0, 1]

    asyncio.run(go())


def test_apply_is_all_or_nothing_and_never_goes_back(blobs):
    async def said(engine):
        return ids_of(await collect(engine, make_request(1, max_new=20)))

    async def refused(engine, manifest, match):
        before = engine.policy_version, await said(engine)
        with pytest.raises(WeightsError, match=match) as caught:
            await engine.apply(manifest)
        assert "\n" not in str(caught.value)
        assert before == (engine.policy_version, await said(engine))

    async def go():
        engine = make_engine(blobs, MODELS["random"])
        good = published(blobs, make_model(9), 5)
        assert await engine.apply(good) == 5
        assert await engine.apply(good) == 5
        at_five = await said(engine)
        await refused(engine, published(blobs, make_model(8), 4), "at 5 already")
        await refused(engine, published(blobs, make_model(8), 5), "other weights")
        torn = published(blobs, make_model(8), 6)
        path = blobs.path(torn["blob"])
        path.write_bytes(path.read_bytes()[:-7])
        await refused(engine, torn, f"version 6: blob {torn['blob']}")
        other = dataclasses.replace(CONFIG, hidden_size=48)
        await refused(engine, published(blobs, K3Model(other), 7), "another model config")
        junk = blobs.put(b"junk")
        broken = {**good, "policy_version": 8, "blob": junk, "checksum": junk, "num_bytes": 4}
        await refused(engine, broken, "version 8")
        assert await said(engine) == at_five

    asyncio.run(go())


def test_an_engine_without_weights_refuses_until_a_version_comes(blobs):
    async def go():
        engine = make_engine(blobs, None)
        assert engine.policy_version == NO_WEIGHTS
        with pytest.raises(EngineError, match="no weights"):
            await collect(engine, make_request(1))
        with pytest.raises(EngineError, match="no weights"):
            await engine.import_state(make_request(1).key.id, b"")
        await engine.apply(published(blobs, MODELS["random"], 1))
        deltas = await collect(engine, make_request(1))
        same = await collect(make_engine(blobs, MODELS["random"]), make_request(1))
        assert ids_of(deltas) == ids_of(same)
        assert set(versions_of(deltas)) == {(1, 1)}

    asyncio.run(go())


def test_greedy_takes_the_most_likely_ids_beside_sampled_neighbours(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"])
        sampled = [make_request(n) for n in range(4)]
        greedy = dataclasses.replace(
            make_request(9, max_new=50), law=SamplingLaw(temperature=0.0), stop_ids=()
        )
        *others, deltas = await asyncio.gather(*(collect(engine, r) for r in [*sampled, greedy]))
        ids = ids_of(deltas)
        assert logprobs_of(deltas).tolist() == [0.0] * 50
        law = law_of(MODELS["random"], np.concatenate([greedy.token_ids, ids]))
        assert law[19:-1].argmax(-1).tolist() == ids
        for request, given in zip(sampled, others, strict=True):
            check_logprobs(MODELS["random"], request, given)

    asyncio.run(go())


@pytest.mark.parametrize("law", [{"temperature": 0.5}, {"top_p": 0.9}, {"temperature": 2.0}])
def test_other_laws_are_refused(blobs, law):
    with pytest.raises(EngineError, match="law"):
        asyncio.run(collect(make_engine(blobs, MODELS["random"]), make_request(1, **law)))


def test_requests_that_cannot_be_served_are_refused_by_name(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"], max_tokens=100)
        with pytest.raises(EngineError, match="more than the engine's 100"):
            await collect(engine, make_request(1, length=60, max_new=41))
        with pytest.raises(EngineError, match="ids"):
            await collect(engine, grown(make_request(1), [CONFIG.vocab_size]))
        with pytest.raises(EngineError, match="no ids"):
            await collect(engine, make_request(1, length=0))
        (delta,) = await collect(engine, make_request(1, max_new=0))
        assert (len(delta.token_ids), delta.finish_reason) == (0, FinishReason.LENGTH)
        full = await collect(engine, make_request(1, length=60, max_new=40))
        check_logprobs(MODELS["random"], make_request(1, length=60), full)

    asyncio.run(go())


def test_an_imported_state_of_another_version_is_not_used(blobs):
    async def go():
        engine, other = make_engine(blobs, MODELS["random"]), make_engine(blobs, make_model(9))
        await other.apply(published(blobs, make_model(8), 2))
        request = make_request(6)
        begun = await collect(engine, request, until=4)
        await other.import_state(request.key.id, await engine.export_state(request.key.id))
        rest = continued(request, begun)
        check_logprobs(make_model(8), rest, await collect(other, rest))
        assert (other.stats.num_prefills, other.stats.num_cache_hits) == (1, 0)

    asyncio.run(go())


def test_a_listener_that_goes_away_frees_its_lane(blobs):
    async def go():
        engine = make_engine(blobs, MODELS["random"], num_slots=1)
        endless = dataclasses.replace(make_request(1, max_new=300), stop_ids=())
        task = asyncio.create_task(collect(engine, endless))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        deltas = await asyncio.wait_for(collect(engine, make_request(2)), 10)
        check_logprobs(MODELS["random"], make_request(2), deltas)
        await engine.aclose()

    asyncio.run(go())


def test_an_error_of_the_loop_is_the_error_of_every_request(blobs):
    async def go():
        engine = make_engine(blobs, make_model(1))
        tasks = [
            asyncio.create_task(
                collect(engine, dataclasses.replace(make_request(n, max_new=300), stop_ids=()))
            )
            for n in range(2)
        ]
        await asyncio.sleep(0.01)
        engine._decoder.pool.max_tokens = 30
        for task in tasks:
            with pytest.raises(EngineError, match="failed"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(EngineError, match="failed"):
            await collect(engine, make_request(5))

    asyncio.run(go())
