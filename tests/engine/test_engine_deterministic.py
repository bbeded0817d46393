"""Deterministic mode: the bits of a sample depend on its prompt, parameters, seed and weights, and on nothing else."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_models import make_model, prompt

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.torch_engine import TorchEngine

KINDS = ["llama", "qwen3"]


def bits(sample) -> tuple:
    return sample.tokens, tuple(x.hex() for x in sample.logprobs)


@pytest.mark.parametrize("kind", KINDS)
async def test_company_order_cache_and_chunks_do_not_change_a_bit(kind):
    model = make_model(kind)
    prompts = [prompt(n, n) for n in (1, 5, 33, 64, 65, 100, 130, 70, 8, 12, 3, 90)]
    params = [SamplingParams(20 + i, seed=i, top_p=1 - 0.3 * (i % 2)) for i in range(len(prompts))]
    alone = []
    for p, q in zip(prompts, params, strict=True):
        alone.append(bits(await TorchEngine({"p": model}, slots=1, deterministic=True).sample("p", p, q)))
    for slots, chunk, order in ((12, 2048, 1), (80, 16, -1), (3, 50, 1)):
        engine = TorchEngine({"p": model}, slots=slots, deterministic=True)
        engine._lanes["p"].chunk = chunk
        jobs = {i: engine.sample("p", prompts[i], params[i]) for i in range(len(prompts))[::order]}
        fillers = [engine.sample("p", prompt(7, 300 + i), SamplingParams(40)) for i in range(70 if slots == 80 else 0)]
        together = await asyncio.gather(*jobs.values(), *fillers)
        assert {i: bits(s) for i, s in zip(jobs, together, strict=False)} == dict(enumerate(alone))
        turned = prompts[6] + together[list(jobs).index(6)].tokens + prompt(9, 77)
        warm = await engine.sample("p", turned, SamplingParams(10, seed=1))
        cold = await TorchEngine({"p": model}, slots=1, deterministic=True).sample(
            "p", turned, SamplingParams(10, seed=1)
        )
        assert warm.cached_tokens > 100 > cold.cached_tokens
        assert bits(warm) == bits(cold)


STATES = (0, 11, 12)


async def phase(engine: TorchEngine, number: int) -> list[tuple]:
    """One round of multi-turn sessions after loading version `number`."""
    state = dict(make_model("llama", seed=STATES[number]).state_dict())
    await engine.load("p", WeightsRef(number, tensors=state))
    contexts = [prompt(10 + i, 10 * number + i) for i in range(6)]
    out = []
    for turn in range(3):
        params = [SamplingParams(5 + i, seed=100 * number + 10 * turn + i) for i in range(6)]
        samples = await asyncio.gather(*(engine.sample("p", c, q) for c, q in zip(contexts, params, strict=True)))
        out += [bits(s) for s in samples]
        contexts = [c + s.tokens + prompt(4, turn) for c, s in zip(contexts, samples, strict=True)]
    return out


async def resumed(first: int) -> list[list[tuple]]:
    """The phases from `first` on, in a fresh engine."""
    engine = TorchEngine({"p": make_model("llama")}, slots=4, deterministic=True)
    return [await phase(engine, number) for number in range(first, len(STATES))]


async def test_a_process_restarted_at_a_load_boundary_continues_bit_for_bit():
    whole = await resumed(0)
    here = Path(__file__)
    code = (
        f"import sys, asyncio, json; sys.path.insert(0, {str(here.parent)!r}); import {here.stem} as t, torch;"
        "torch.set_num_threads(1); print(json.dumps(asyncio.run(t.resumed(1))))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == json.loads(json.dumps(whole[1:]))
