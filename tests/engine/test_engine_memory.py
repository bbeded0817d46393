"""Memory follows what is stored: untouched rows take none, and finished sequences give way when rows grow long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import drift, prompt

from inspan.engine import kv, torch_engine
from inspan.engine.base import SamplingParams
from inspan.engine.kv import KVPool
from inspan.engine.torch_engine import TorchEngine

STATUS = Path("/proc/self/status")


def resident() -> int:
    """Bytes of memory that the process has written to."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
@torch.inference_mode()
def test_a_pool_takes_memory_as_it_is_written_and_gives_it_back(llama):
    spec = TorchEngine({"p": llama}).spec("p")
    before = resident()
    pool = KVPool(spec, rows=4096, budget=1 << 30)
    pool.grow(1024, [])  # a GiB of room
    assert resident() - before < 64 << 20
    for keys, values in zip(pool.keys, pool.values, strict=True):
        keys[:64].fill_(1.0)
        values[:64].fill_(1.0)
    pool.grow(2048, [100] * 10)
    assert resident() - before < 64 << 20
    assert (pool.keys[1][9, ..., :100] == 1).all() and not pool.keys[1][9, ..., 100:].any()
    assert (pool.values[1][9, :, :100] == 1).all() and not pool.values[1][10].any()


@pytest.fixture
def small_budget(llama, monkeypatch) -> int:
    """An engine's policy may keep eight rows of 64 positions."""
    spec = TorchEngine({"p": llama}).spec("p")
    monkeypatch.setattr(kv, "FIRST", 64)
    monkeypatch.setattr(torch_engine, "POOL_BYTES", 8 * 64 * spec.kv_bytes)
    monkeypatch.setattr(torch_engine, "POOL_WEIGHTS", 0)
    return 8


async def test_finished_sequences_stay_within_the_budget(llama, small_budget):
    engine = TorchEngine({"p": llama}, slots=2)
    for i in range(12):
        await engine.sample("p", prompt(30, i), SamplingParams(2, seed=0))
    used = np.flatnonzero(engine._lanes["p"].slots.state)
    assert used.tolist() == list(range(small_budget))
    newest = await engine.sample("p", prompt(30, 11), SamplingParams(2, seed=0))
    oldest = await engine.sample("p", prompt(30, 0), SamplingParams(2, seed=0))
    assert newest.cached_tokens == 29 and oldest.cached_tokens == 0


async def test_longer_rows_push_finished_sequences_out(llama, small_budget):
    engine = TorchEngine({"p": llama}, slots=2)
    for i in range(8):
        await engine.sample("p", prompt(30, i), SamplingParams(2, seed=0))
    long = prompt(30, 7) + prompt(80, 99)  # continues the last row, which is beyond the new budget
    sample = await engine.sample("p", long, SamplingParams(5, seed=0))
    assert sample.cached_tokens >= 30 and drift(llama, long, sample) < 1e-4
    assert len(np.flatnonzero(engine._lanes["p"].slots.state)) <= small_budget // 2 + 1
    kept = await engine.sample("p", prompt(30, 1), SamplingParams(2, seed=0))
    gone = await engine.sample("p", prompt(30, 6), SamplingParams(2, seed=0))
    assert kept.cached_tokens == 29 and gone.cached_tokens == 0


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_runs_gets_its_rows_beyond_the_budget(llama, small_budget, deterministic):
    engine = TorchEngine({"p": llama}, slots=12, deterministic=deterministic)
    prompts = [prompt(20 + 10 * i, i) for i in range(12)]
    samples = await asyncio.gather(
        *(engine.sample("p", p, SamplingParams(40 + i, seed=i)) for i, p in enumerate(prompts))
    )
    assert all(drift(llama, p, s) < 1e-4 for p, s in zip(prompts, samples, strict=True))
    assert [len(s.tokens) for s in samples] == [40 + i for i in range(12)]
