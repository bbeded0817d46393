"""Samples follow the distribution whose log-prob is recorded, and depend on their seed alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from engine_models import VOCAB, prompt, reference_logits
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from inspan.engine.base import SamplingParams
from inspan.engine.sampler import Draw, pick, sample, spread, truncate, uniforms
from inspan.engine.torch_engine import TorchEngine


def distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The sampling distribution of one row of logits, written down naively."""
    if params.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    p = torch.softmax(logits.double() / params.temperature, -1)
    order = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))
    keep = order[: params.top_k] if params.top_k else order
    total, kept, mass = float(sum(p[i] for i in keep)), [], 0.0
    for i in keep:
        if mass / total >= params.top_p:
            break
        kept.append(i)
        mass += float(p[i])
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


PARAMS = [
    SamplingParams(12),
    SamplingParams(12, temperature=0.6),
    SamplingParams(12, temperature=1.7),
    SamplingParams(12, top_p=0.8),
    SamplingParams(12, top_k=5),
    SamplingParams(12, temperature=1.3, top_p=0.7, top_k=20),
    SamplingParams(12, temperature=0.0),
]


async def test_logprobs_are_of_the_sampling_distribution_whatever_the_neighbours_parameters(llama):
    engine = TorchEngine({"p": llama}, slots=8)
    prompts = [prompt(10 + i, i) for i in range(len(PARAMS))]
    samples = await asyncio.gather(*(engine.sample("p", p, q) for p, q in zip(prompts, PARAMS, strict=True)))
    for p, q, s in zip(prompts, PARAMS, samples, strict=True):
        logits = reference_logits(llama, p + s.tokens)
        for i, (token, logprob) in enumerate(zip(s.tokens, s.logprobs, strict=True)):
            expected = distribution(logits[len(p) - 1 + i], q)
            assert expected[token] > 0
            assert abs(float(expected[token].log()) - logprob) < 1e-4


@pytest.mark.parametrize("params", [SamplingParams(1), SamplingParams(1, temperature=0.7, top_p=0.9)])
async def test_the_frequencies_follow_the_distribution(llama, params):
    engine = TorchEngine({"p": llama}, slots=64)
    p = prompt(10, 3)
    count = 4000
    jobs = [engine.sample("p", p, SamplingParams(**{**as_dict(params), "seed": i})) for i in range(count)]
    drawn = [s.tokens[0] for s in await asyncio.gather(*jobs)]
    expected = distribution(reference_logits(llama, p)[-1], params).numpy() * count
    seen = np.bincount(drawn, minlength=VOCAB)
    assert seen[expected == 0].sum() == 0
    often = expected >= 5
    observed = np.append(seen[often], seen[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    keep = wanted > 0
    assert stats.chisquare(observed[keep], wanted[keep] * observed.sum() / wanted.sum()).pvalue > 1e-3


def as_dict(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in params.__slots__}


async def test_the_positions_of_one_request_are_independent(llama):
    """Successive uniforms of a stream, and the same position of successive streams, are uncorrelated and uniform."""
    along = uniforms(np.full(20000, spread(7)), np.arange(20000))
    across = uniforms(np.array([spread(i) for i in range(20000)]), np.zeros(20000, dtype=np.int64))
    for u in (along, across):
        assert stats.kstest(u, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03


async def test_a_seed_gives_the_same_tokens_in_any_order_and_company(llama):
    prompts = {seed: prompt(6 + seed % 9, seed) for seed in range(12)}
    params = {s: SamplingParams(10, seed=s, temperature=1.0 + s % 2, top_p=1 - 0.2 * (s % 3)) for s in prompts}

    async def run(order: list[int], slots: int) -> dict[int, tuple[int, ...]]:
        engine = TorchEngine({"p": llama}, slots=slots)
        samples = await asyncio.gather(*(engine.sample("p", prompts[s], params[s]) for s in order))
        return {s: x.tokens for s, x in zip(order, samples, strict=True)}

    forward = await run(list(prompts), 12)
    assert forward == await run(list(reversed(prompts)), 3)
    assert forward == await run(list(prompts), 1)


async def test_top_logprobs_are_the_models_own(llama):
    engine = TorchEngine({"p": llama}, slots=2)
    p = prompt(9, 4)
    s, plain = await asyncio.gather(
        engine.sample("p", p, SamplingParams(6, seed=1, top_logprobs=3, top_p=0.5)),
        engine.sample("p", prompt(5, 5), SamplingParams(6, seed=2)),
    )
    assert plain.top == ()
    logits = reference_logits(llama, p + s.tokens).log_softmax(-1)
    for i, top in enumerate(s.top):
        values, ids = logits[len(p) - 1 + i].topk(3)
        assert [t for t, _ in top] == ids.tolist()
        assert max(abs(v - float(w)) for (_, v), w in zip(top, values, strict=True)) < 1e-4


floats = st.floats(0, 1, width=32)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-7, 0.1, 0.5, 1.0]), min_size=1, max_size=20), floats)
def test_a_token_of_probability_zero_is_never_picked(weights, u):
    if sum(weights) == 0:
        weights = [*weights, 1.0]
    p = torch.tensor([weights])
    p = p / p.sum()
    u = min(u, 1 - 2.0**-23)  # what `uniforms` can give
    assert p[0, int(pick(p, torch.tensor([u], dtype=torch.float32))[0, 0])] > 0


def test_uniforms_stay_below_one():
    u = uniforms(np.array([spread(i) for i in range(1000)]), np.arange(1000))
    assert u.min() >= 0 and u.max() <= 1 - 2.0**-23


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=12),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.053, 0.47, 0.93, 1.0]),  # no sum of equal shares: there rounding decides
    st.integers(0, 14),
)
def test_truncation_keeps_what_the_naive_rule_keeps(values, temperature, top_p, top_k):
    logits = torch.tensor([values], dtype=torch.float32)
    params = SamplingParams(1, temperature=temperature, top_p=top_p, top_k=top_k)
    draw = Draw(
        keys=np.array([spread(1)]),
        counters=np.zeros(1, dtype=np.int64),
        temperature=np.array([temperature], dtype=np.float32),
        top_p=np.array([top_p], dtype=np.float32),
        top_k=np.array([top_k]),
        plain=False,
    )
    mass = torch.softmax(logits[0].double() / (temperature or 1.0), -1).sort(descending=True).values[: top_k or None]
    assume(bool(((mass / mass.sum()).cumsum(-1) - top_p).abs().min() > 1e-5) or top_p == 1)  # no toss-ups
    expected = distribution(logits[0], params)
    if temperature:
        kept = torch.softmax(truncate(logits / temperature, draw.top_p, draw.top_k)[0].double(), -1)
        assert (kept - expected).abs().max() < 1e-6
    ids, logprobs = sample(logits.clone(), draw)
    assert abs(float(expected[int(ids[0])].log()) - float(logprobs[0])) < 1e-5


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_greedy_rows_take_the_first_best_token_and_tell_of_broken_logits(others):
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1, 3, 3, 0], [-inf, -2, -9, -2], [0, nan, 1, 2], [inf, 0, 0, 0], [0, 1, 2, 3]])
    draw = Draw(
        keys=np.array([spread(i) for i in range(5)]),
        counters=np.zeros(5, dtype=np.int64),
        temperature=np.array([0, 0, 0, 0, others], dtype=np.float32),
        top_p=np.array([1, 0.3, 1, 1, 1e-6], dtype=np.float32),
        top_k=np.array([0, 3, 0, 0, 0]),
        plain=False,
    )
    ids, logprobs = sample(logits, draw)
    assert ids[[0, 1, 4]].tolist() == [1, 1, 3]
    assert logprobs[[0, 1, 4]].tolist() == [0, 0, 0] and np.isnan(logprobs[[2, 3]]).all()
