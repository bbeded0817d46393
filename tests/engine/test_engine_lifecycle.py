"""Versions, several policies, bounds, cancellation and faults."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_models import make_model, prompt, reference_logits

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.torch_engine import TorchEngine
from inspan.errors import EngineError, EngineOverloaded, RequestError


async def until(engine: TorchEngine, tokens: int) -> None:
    """Let the engine decode so many tokens."""
    while engine.counters.decoded_tokens < tokens:
        await asyncio.sleep(0)


async def test_a_swap_in_flight_marks_every_token_with_its_version(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    p, other = prompt(12, 1), make_model("llama", seed=7)
    running = asyncio.ensure_future(engine.sample("p", p, SamplingParams(24, seed=3)))
    await until(engine, 6)
    done = engine.counters.decoded_tokens
    await engine.load("p", WeightsRef(4, tensors=dict(other.state_dict())))
    assert engine.version("p") == 4
    sample = await running
    assert sample.versions == (0,) * done + (4,) * (24 - done)
    before = reference_logits(llama, p + sample.tokens).log_softmax(-1)
    for i in range(done):
        assert abs(float(before[len(p) - 1 + i, sample.tokens[i]]) - sample.logprobs[i]) < 1e-4
    after = reference_logits(other, p + sample.tokens).log_softmax(-1)
    drift = [abs(float(after[len(p) - 1 + i, sample.tokens[i]]) - sample.logprobs[i]) for i in range(done, 24)]
    assert max(drift) > 1e-3  # the old KV is kept: not what the new weights alone would give


async def test_two_policies_at_once_give_what_each_gives_alone(llama):
    models = {"a": llama, "b": make_model("qwen3", seed=1)}
    prompts = [prompt(8 + i, i) for i in range(6)]
    both = TorchEngine(models, slots=4)
    jobs = [(name, p) for p in prompts for name in models]
    mixed = await asyncio.gather(*(both.sample(n, p, SamplingParams(12, seed=5)) for n, p in jobs))
    for (name, p), sample in zip(jobs, mixed, strict=True):
        alone = await TorchEngine({name: models[name]}, slots=1).sample(name, p, SamplingParams(12, seed=5))
        assert alone.tokens == sample.tokens
        assert max(abs(a - b) for a, b in zip(alone.logprobs, sample.logprobs, strict=True)) < 1e-4


async def test_policies_with_the_same_files_share_memory_until_one_is_updated(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    engine = TorchEngine({"policy": str(tmp_path), "policy@v0": str(tmp_path)}, slots=2)
    first, frozen = engine._lanes["policy"].weights, engine._lanes["policy@v0"].weights
    assert first is frozen
    p = prompt(9, 1)
    before = await engine.sample("policy@v0", p, SamplingParams(5, seed=1))
    await engine.load("policy", WeightsRef(1, tensors=dict(make_model("llama", seed=2).state_dict())))
    after = await engine.sample("policy@v0", p, SamplingParams(5, seed=1))
    moved = await engine.sample("policy", p, SamplingParams(5, seed=1))
    assert before.tokens == after.tokens != moved.tokens
    assert (engine.version("policy"), engine.version("policy@v0")) == (1, 0)


async def test_policies_can_be_added_while_it_runs(llama, tmp_path):
    engine = TorchEngine({"policy": llama}, slots=2)
    other = make_model("qwen2", seed=4)
    other.save_pretrained(tmp_path)
    p = prompt(9, 1)
    running = asyncio.ensure_future(engine.sample("policy", p, SamplingParams(20, seed=1)))
    await until(engine, 3)
    await engine.load("judge", WeightsRef(2, path=str(tmp_path)))
    await engine.load("policy@v1", WeightsRef(1, tensors=dict(make_model("llama", seed=8).state_dict())))
    engine.share("policy@v0", "policy")
    samples = {n: await engine.sample(n, p, SamplingParams(4, temperature=0.0)) for n in engine.policies}
    assert samples["judge"].tokens[0] == int(reference_logits(other, p)[-1].argmax())
    assert samples["judge"].versions[0] == 2 and samples["policy@v1"].versions[0] == 1
    assert samples["policy@v0"].tokens == samples["policy"].tokens
    assert len((await running).tokens) == 20


async def test_incomplete_or_old_weights_change_nothing(llama):
    engine = TorchEngine({"p": llama}, slots=2)
    state = dict(llama.state_dict())
    await engine.load("p", WeightsRef(3, tensors=state))
    p = prompt(9, 1)
    before = await engine.sample("p", p, SamplingParams(5, seed=1))
    with pytest.raises(EngineError, match="older"):
        await engine.load("p", WeightsRef(2, tensors=state))
    broken = {k: v for k, v in make_model("llama", seed=5).state_dict().items() if "layers.1.mlp.down" not in k}
    with pytest.raises(EngineError, match=r"layers\.1\.mlp\.down"):
        await engine.load("p", WeightsRef(4, tensors=broken))
    assert engine.version("p") == 3
    assert (await engine.sample("p", p, SamplingParams(5, seed=1))).tokens == before.tokens


async def test_the_queue_is_bounded(llama):
    engine = TorchEngine({"p": llama}, slots=1, max_queue=2)
    p = prompt(5, 1)
    jobs = [asyncio.ensure_future(engine.sample("p", p, SamplingParams(4, seed=i))) for i in range(4)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(r, EngineOverloaded) for r in results] == [False, False, True, True]
    await engine.sample("p", p, SamplingParams(4, seed=9))  # room again


async def test_cancelling_frees_the_row_at_once(llama):
    engine = TorchEngine({"p": llama}, slots=1)
    p = prompt(5, 1)
    running = asyncio.ensure_future(engine.sample("p", p, SamplingParams(200, seed=1)))
    queued = asyncio.ensure_future(engine.sample("p", prompt(6, 2), SamplingParams(200, seed=2)))
    waiting = asyncio.ensure_future(engine.sample("p", prompt(7, 3), SamplingParams(3, seed=3)))
    await until(engine, 2)
    queued.cancel()
    running.cancel()
    sample = await waiting
    assert len(sample.tokens) == 3
    assert engine.counters.decoded_tokens < 50
    assert running.cancelled() and queued.cancelled()


async def test_cancelling_the_leader_of_a_group_keeps_its_twins(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    engine._lanes["p"].chunk = 8  # the prompt takes several steps
    p = prompt(40, 1)
    jobs = [asyncio.ensure_future(engine.sample("p", p, SamplingParams(5, seed=i))) for i in range(3)]
    while engine.counters.steps < 2:
        await asyncio.sleep(0)
    jobs[0].cancel()
    rest = await asyncio.gather(*jobs[1:])
    alone = await TorchEngine({"p": llama}, slots=1).sample("p", p, SamplingParams(5, seed=1))
    assert rest[0].tokens == alone.tokens and len(rest[1].tokens) == 5


async def test_a_completion_is_cut_at_the_context_and_a_prompt_beyond_it_refused(llama):
    engine = TorchEngine({"p": llama}, slots=2, context_length=20)
    sample = await engine.sample("p", prompt(15, 1), SamplingParams(50, seed=1))
    assert (len(sample.tokens), sample.stop) == (5, "length")
    follow = await engine.sample("p", prompt(15, 1) + sample.tokens[:4], SamplingParams(50, seed=1))
    assert len(follow.tokens) == 1
    with pytest.raises(RequestError) as error:
        await engine.sample("p", prompt(20, 1), SamplingParams(1))
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("tokens", "params", "word"),
    [
        ((), SamplingParams(5), "empty"),
        ((1, 97), SamplingParams(5), "outside"),
        ((1, -1), SamplingParams(5), "outside"),
        ((1,), SamplingParams(0), "max_tokens"),
        ((1,), SamplingParams(5, top_p=0.0), "top_p"),
        ((1,), SamplingParams(5, temperature=-1.0), "temperature"),
        ((1,), SamplingParams(5, temperature=float("nan")), "temperature"),
    ],
)
async def test_malformed_requests_are_refused(llama, tokens, params, word):
    engine = TorchEngine({"p": llama}, slots=2)
    with pytest.raises(RequestError, match=word):
        await engine.sample("p", tokens, params)


async def test_an_unknown_policy_is_named_with_the_known_ones(llama):
    with pytest.raises(EngineError, match="known: p"):
        await TorchEngine({"p": llama}, slots=2).sample("q", (1,), SamplingParams(5))


async def test_stop_ids_end_a_sample_and_belong_to_it(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    p = prompt(9, 1)
    free = await engine.sample("p", p, SamplingParams(30, seed=4))
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    params = SamplingParams(30, seed=4, stop_ids=(96, stop, 95) if stop not in (95, 96) else (stop,))
    sample = await engine.sample("p", p, params)
    assert sample.stop == "stop" and len(sample.tokens) <= first + 1 and sample.tokens[-1] in params.stop_ids


async def test_a_watcher_sees_every_token_once_and_can_stop(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    seen: list[int] = []

    def watch(ids) -> bool:
        seen.extend(ids)
        return len(seen) == 6

    watched = engine.sample("p", prompt(9, 1), SamplingParams(30, seed=4), watch)
    sample, other = await asyncio.gather(watched, engine.sample("p", prompt(9, 2), SamplingParams(12, seed=4)))
    assert tuple(seen) == sample.tokens and sample.stop == "stop" and len(other.tokens) == 12
    seen.clear()
    full = await engine.sample("p", prompt(9, 1), SamplingParams(4, seed=4), watch)
    assert tuple(seen) == full.tokens and full.stop == "length"


async def test_a_watcher_that_raises_fails_its_own_request_only(llama):
    def watch(ids) -> bool:
        raise ValueError("my own fault")

    engine = TorchEngine({"p": llama}, slots=4)
    jobs = (
        engine.sample("p", prompt(9, 1), SamplingParams(9, seed=1), watch),
        engine.sample("p", prompt(9, 2), SamplingParams(9, seed=1)),
    )
    bad, good = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(bad, ValueError) and len(good.tokens) == 9


async def test_a_fault_in_a_step_fails_what_is_in_it_and_nothing_later(llama, monkeypatch):
    engine = TorchEngine({"p": llama, "q": llama}, slots=2)
    p = prompt(9, 1)
    jobs = [asyncio.ensure_future(engine.sample("p", p, SamplingParams(30, seed=i))) for i in range(2)]
    jobs += [asyncio.ensure_future(engine.sample("p", prompt(8, 2), SamplingParams(3, seed=9)))]  # waits for a row
    jobs += [asyncio.ensure_future(engine.sample("q", p, SamplingParams(30, seed=1)))]
    await until(engine, 6)
    lane = engine._lanes["p"]
    with monkeypatch.context() as patch:
        patch.setattr(lane.pool, "places", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
        await asyncio.wait(jobs[:2])
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "out of memory" in str(r) for r in results[:2])
    assert len(results[2].tokens) == 3 and len(results[3].tokens) == 30
    assert (await engine.sample("p", p, SamplingParams(30, seed=1))).tokens == results[3].tokens


async def test_a_fault_at_admission_fails_that_request(llama, monkeypatch):
    engine = TorchEngine({"p": llama}, slots=2)
    lane = engine._lanes["p"]
    with monkeypatch.context() as patch:
        patch.setattr(lane, "_fit", lambda *_, **__: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(EngineError, match="MemoryError"):
            await engine.sample("p", prompt(9, 1), SamplingParams(3, seed=1))
    assert len((await engine.sample("p", prompt(9, 1), SamplingParams(3, seed=1))).tokens) == 3


async def test_diverged_weights_are_an_engine_error_and_leave_no_poison(llama):
    engine = TorchEngine({"p": llama}, slots=2)
    p = prompt(9, 1)
    good = await engine.sample("p", p, SamplingParams(8, seed=1))
    broken = {k: torch.full_like(v, float("nan")) for k, v in llama.state_dict().items()}
    await engine.load("p", WeightsRef(1, tensors=broken))
    with pytest.raises(EngineError, match="not finite"):
        await engine.sample("p", p, SamplingParams(8, seed=1))
    await engine.load("p", WeightsRef(2, tensors=dict(llama.state_dict())))
    assert (await engine.sample("p", p, SamplingParams(8, seed=1))).tokens == good.tokens


async def test_closing_fails_what_runs(llama):
    engine = TorchEngine({"p": llama}, slots=1)
    jobs = [asyncio.ensure_future(engine.sample("p", prompt(9, i), SamplingParams(99))) for i in range(2)]
    await until(engine, 2)
    await engine.close()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert all(isinstance(r, EngineError) for r in results)
    with pytest.raises(EngineError):
        await engine.sample("p", prompt(9, 1), SamplingParams(3))


def test_one_engine_serves_one_event_loop_after_another(llama):
    engine = TorchEngine({"p": llama}, slots=2)

    async def abandon() -> None:
        job = asyncio.ensure_future(engine.sample("p", prompt(9, 1), SamplingParams(99, seed=1)))
        await until(engine, 2)
        del job

    asyncio.run(abandon())
    sample = asyncio.run(engine.sample("p", prompt(9, 1), SamplingParams(5, seed=1)))
    assert len(sample.tokens) == 5
