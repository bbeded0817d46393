"""Everything at once: uneven sessions, groups, cancellations, a swap, few rows, small chunks. Samples stay exact."""

from __future__ import annotations

import asyncio
import random

import pytest
from engine_models import drift, make_model, prompt

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.torch_engine import TorchEngine


@pytest.mark.parametrize(("seed", "deterministic"), [(0, False), (1, False), (2, False), (3, True)])
async def test_a_busy_engine_samples_exactly_what_it_says(seed, deterministic):
    models = {0: make_model("llama"), 1: make_model("llama", seed=21)}
    draw = random.Random(seed)
    engine = TorchEngine(
        {"p": models[0], "q": make_model("qwen2", seed=5)},
        slots=draw.choice([3, 6]),
        cached=draw.choice([2, 10]),
        deterministic=deterministic,
    )
    for lane in engine._lanes.values():
        lane.chunk = draw.choice([5, 40])
    checked = cancelled = 0

    async def session(number: int) -> None:
        nonlocal checked, cancelled
        context = prompt(draw.randint(1, 50), number // 3)  # groups of three share their prompt
        for turn in range(draw.randint(1, 4)):
            policy = draw.choice(["p", "p", "q"])
            version = engine.version("p")
            job = asyncio.ensure_future(
                engine.sample(policy, context, SamplingParams(draw.randint(1, 25), seed=100 * number + turn))
            )
            if draw.random() < 0.15:
                for _ in range(draw.randint(0, 20)):
                    await asyncio.sleep(0)
                job.cancel()
            try:
                sample = await job
            except asyncio.CancelledError:
                cancelled += 1
                return
            if policy == "p" and set(sample.versions) == {version}:  # else its KV is of two versions
                assert drift(models[sample.versions[0]], context, sample) < 1e-4
                checked += 1
            context += sample.tokens + prompt(draw.randint(1, 12), number + turn)
            for _ in range(draw.randint(0, 30)):
                await asyncio.sleep(0)

    async def swap() -> None:
        while engine.counters.decoded_tokens < 150:
            await asyncio.sleep(0)
        await engine.load("p", WeightsRef(1, tensors=dict(models[1].state_dict())))

    await asyncio.gather(swap(), *(session(i) for i in range(24)))
    assert checked >= 8 and cancelled > 0 and engine.counters.reused_tokens > 0
    assert not any(lane.has_work for lane in engine._lanes.values())
