"""Nothing is computed twice: groups share their prompt, sessions their earlier turns, while the weights stay."""

from __future__ import annotations

import asyncio

import pytest
from engine_models import drift as worst
from engine_models import make_model, prompt

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.torch_engine import TorchEngine


async def test_a_group_of_eight_prefills_its_prompt_once(llama):
    engine = TorchEngine({"p": llama}, slots=8)
    p = prompt(50, 1)
    samples = await asyncio.gather(*(engine.sample("p", p, SamplingParams(10, seed=i)) for i in range(8)))
    assert engine.counters.prefilled_tokens == 50
    assert engine.counters.reused_tokens == 7 * 50
    assert len({s.tokens for s in samples}) > 1
    assert all(worst(llama, p, s) < 1e-4 for s in samples)


async def test_members_that_come_late_reuse_the_prompt_too(llama):
    engine = TorchEngine({"p": llama}, slots=8)
    p = prompt(50, 1)
    first = asyncio.ensure_future(engine.sample("p", p, SamplingParams(30, seed=0)))
    while engine.counters.decoded_tokens < 3:
        await asyncio.sleep(0)
    late = await engine.sample("p", p, SamplingParams(10, seed=1))
    assert engine.counters.prefilled_tokens == 51  # the last token once more, for its logits
    assert late.cached_tokens == 49
    assert worst(llama, p, late) < 1e-4 and worst(llama, p, await first) < 1e-4


async def test_prompts_that_share_a_long_prefix_compute_it_once(llama):
    engine = TorchEngine({"p": llama}, slots=8)
    system = prompt(60, 2)
    prompts = [system + prompt(5, 10 + i) for i in range(4)]
    samples = await asyncio.gather(*(engine.sample("p", p, SamplingParams(6, seed=i)) for i, p in enumerate(prompts)))
    assert engine.counters.prefilled_tokens == 60 + 4 * 5
    assert all(worst(llama, p, s) < 1e-4 for p, s in zip(prompts, samples, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_session_of_ten_turns_computes_each_token_once(llama, deterministic):
    engine = TorchEngine({"p": llama}, slots=4, deterministic=deterministic)
    context = prompt(20, 3)
    fed = 0
    for turn in range(10):
        sample = await engine.sample("p", context, SamplingParams(6, seed=turn))
        assert worst(llama, context, sample) < 1e-4
        fed += len(sample.tokens) - 1  # fed back by decoding; the last one is computed with the next turn
        context += sample.tokens + prompt(4, 50 + turn)
    computed = 20 + 9 * (6 + 4)  # the prompt of the tenth turn
    assert engine.counters.prefilled_tokens + fed - 5 == computed
    assert engine.counters.moved_rows == 0  # a lone session stays in its row


async def test_interleaved_sessions_with_slow_tools_keep_their_cache(llama):
    engine = TorchEngine({"p": llama}, slots=3, cached=9)
    contexts = [prompt(20 + i, 200 + i) for i in range(12)]
    for turn in range(3):
        before = engine.counters.prefilled_tokens
        samples = await asyncio.gather(
            *(engine.sample("p", c, SamplingParams(4 + i % 3, seed=i)) for i, c in enumerate(contexts))
        )
        for c, s in zip(contexts, samples, strict=True):
            assert worst(llama, c, s) < 1e-4
        if turn:
            assert engine.counters.prefilled_tokens - before == 12 * (1 + 5)
        contexts = [
            c + s.tokens + prompt(5, turn * 100 + i) for i, (c, s) in enumerate(zip(contexts, samples, strict=True))
        ]


async def test_the_least_recently_used_sequence_is_dropped_first(llama):
    engine = TorchEngine({"p": llama}, slots=1, cached=1)
    one, two, three = (prompt(20, i) for i in (1, 2, 3))
    for p in (one, two, one, three):  # two rows; `two` is the oldest when `three` comes
        await engine.sample("p", p, SamplingParams(1, seed=0))
    kept = await engine.sample("p", one, SamplingParams(1, seed=0))
    gone = await engine.sample("p", two, SamplingParams(1, seed=0))
    assert kept.cached_tokens == 19 and gone.cached_tokens == 0


async def test_a_branch_leaves_the_sequence_it_came_from_intact(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    stem = prompt(30, 5)
    sample = await engine.sample("p", stem, SamplingParams(8, seed=0))
    branch = stem + prompt(3, 6)
    other = await engine.sample("p", branch, SamplingParams(8, seed=0))
    again = await engine.sample("p", stem + sample.tokens, SamplingParams(8, seed=0))
    assert other.cached_tokens == 30 and again.cached_tokens == 37
    assert worst(llama, branch, other) < 1e-4 and worst(llama, stem + sample.tokens, again) < 1e-4


async def test_new_weights_end_the_reuse(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    p = prompt(30, 5)
    await engine.sample("p", p, SamplingParams(3, seed=0))
    other = make_model("llama", seed=9)
    await engine.load("p", WeightsRef(1, tensors=dict(other.state_dict())))
    sample = await engine.sample("p", p, SamplingParams(3, seed=0))
    assert sample.cached_tokens == 0 and sample.versions == (1, 1, 1)
    assert worst(other, p, sample) < 1e-4


async def test_a_sequence_computed_under_two_versions_is_not_reused(llama):
    engine = TorchEngine({"p": llama}, slots=4)
    p = prompt(30, 5)
    running = asyncio.ensure_future(engine.sample("p", p, SamplingParams(20, seed=0)))
    while engine.counters.decoded_tokens < 5:
        await asyncio.sleep(0)
    await engine.load("p", WeightsRef(1, tensors=dict(llama.state_dict())))
    sample = await running
    assert set(sample.versions) == {0, 1}
    follow = await engine.sample("p", p + sample.tokens, SamplingParams(2, seed=0))
    assert follow.cached_tokens == 0
