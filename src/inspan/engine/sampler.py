"""Sampling. Contract: a recorded log-prob is of the distribution sampled from; zero-probability tokens never come.

The uniform behind token i of a request is a function of (seed, i) alone, so what a request yields depends neither on
its neighbours in the batch nor on the order of arrival. One uniform, a cumulative sum and a binary search give both
the token and its probability (Gumbel noise would cost a random number per vocabulary entry).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S41 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(41)
_UNIT = 2.0**-23


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _S30)) * _M1
    z = (z ^ (z >> _S27)) * _M2
    return z ^ (z >> _S31)


def spread(seed: int) -> np.uint64:
    """A request's seed (any int) as a stream key; near seeds give unrelated streams."""
    return np.uint64(_mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))[0])


def uniforms(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Uniform i of each stream, in [0, 1 − 2⁻²³], float32: SplitMix64 (Steele, Lea & Flood 2014) at position i.

    The upper bound keeps `u · total` below `total` in float32, whatever the total.
    """
    bits = _mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN) >> _S41
    return bits.astype(np.float32) * np.float32(_UNIT)


@dataclass(slots=True)
class Draw:
    """How to sample each of n rows: arrays of length n. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    keys: np.ndarray  # uint64
    counters: np.ndarray  # int64
    temperature: np.ndarray  # float32
    top_p: np.ndarray  # float32
    top_k: np.ndarray  # int64
    plain: bool  # all rows have temperature 1 and neither top_p nor top_k


def sample(logits: Tensor, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int64) and log-probs (float32) of n rows of logits. Consumes (overwrites) the logits.

    A row whose logits are not finite gets the log-prob NaN (and a meaningless id).
    """
    if draw.plain:
        return _draw(logits, draw)
    greedy = draw.temperature <= 0
    if greedy.all():
        return _best(logits)
    logits = logits.float().div_(torch.from_numpy(np.where(greedy, np.float32(1.0), draw.temperature)).unsqueeze(1))
    cut = np.flatnonzero(~greedy & ((draw.top_p < 1) | (draw.top_k > 0)))
    if cut.size:  # sorting costs more than all else of a small model's step: only what needs it is sorted
        logits[cut] = truncate(logits[cut], draw.top_p[cut], draw.top_k[cut])
    ids, logprobs = _draw(logits, draw)
    sure = np.flatnonzero(greedy)
    if sure.size:
        ids[sure], logprobs[sure] = _best(logits[sure])
    return ids, logprobs


def _draw(logits: Tensor, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """A token of softmax(logits) for each row, and its log-prob."""
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    ids = pick(probabilities, torch.from_numpy(uniforms(draw.keys, draw.counters)))
    chosen = probabilities.gather(1, ids).log_()
    return ids.squeeze(1).numpy(), chosen.squeeze(1).numpy()


def _best(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The most probable token of each row, the smaller id of equals, at log-prob 0 (NaN where the best is infinite)."""
    best, ids = logits.float().max(-1)
    return ids.numpy(), (best - best).numpy()


def pick(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds u · total: (n, 1) int64. Zero entries are never picked."""
    cumulative = probabilities.cumsum(-1)
    ids = torch.searchsorted(cumulative, u.unsqueeze(1) * cumulative[:, -1:], right=True)
    return ids.clamp_(max=probabilities.shape[1] - 1)


def truncate(logits: Tensor, top_p: np.ndarray, top_k: np.ndarray) -> Tensor:
    """Logits (n, vocab) with −inf outside each row's top-k and nucleus (top-p); arrays of length n, off at 0 and 1.

    Top-p keeps the smallest set of most probable tokens whose mass reaches p (Holtzman et al. 2020), after top-k;
    ties go to the smaller id. At least one token stays.
    """
    vocab = logits.shape[1]
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    k = torch.from_numpy(np.where((top_k > 0) & (top_k < vocab), top_k, vocab)).unsqueeze(1)
    dropped = torch.arange(vocab) >= k
    mass = torch.softmax(ordered.masked_fill(dropped, float("-inf")), -1, dtype=torch.float32)
    before = mass.cumsum(-1) - mass
    p = torch.from_numpy(top_p).unsqueeze(1)
    dropped |= (before >= p) & (p < 1)
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), float("-inf"))


def top_logprobs(logits: Tensor, temperature: float, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable (id, log-prob) of one row of logits, before truncation; temperature 0 counts as 1."""
    scaled = torch.log_softmax(logits.float() / (temperature if temperature > 0 else 1.0), -1)
    values, ids = torch.topk(scaled, min(count, scaled.shape[0]))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
