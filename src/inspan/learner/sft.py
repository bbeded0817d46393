"""Supervised training on (tokens, weights) rows: the warm start's core.

Contract: phases run one after the other; which examples a step sees follows from (seed, phase, examples drawn so far)
alone, so a resumed run equals an uninterrupted one bit for bit. The loss of a step is the weighted mean of −log p over
its batch, whatever the micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from inspan.errors import InputError
from inspan.learner.model import micro_batches, token_logprobs, trainable_parameters
from inspan.learner.optim import Optimiser, OptimSettings, learning_rate
from inspan.learner.packing import Row, pack
from inspan.trace.records import Tokens


@dataclass(frozen=True, slots=True)
class Example:
    """`weights[i]` ≥ 0 is the weight of −log p(tokens[i] | tokens[:i]); the first token's weight must be 0."""

    tokens: Tokens
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        fits = len(self.tokens) == len(self.weights) and any(self.weights)
        if not fits or self.weights[0] or min(self.weights) < 0:
            raise InputError(
                f"an example of {len(self.tokens)} tokens and {len(self.weights)} weights cannot be trained on",
                hint="equal lengths; weights ≥ 0, the first 0, some above 0",
            )


Source = Sequence[Example] | Callable[[np.random.Generator], Example]
"""Where examples come from: a fixed set, shuffled anew each epoch, or a function that draws one from a generator."""


@dataclass(frozen=True, slots=True)
class Phase:
    """`steps` updates on `source`; a step's batch holds at least one example and at most `batch_tokens` tokens."""

    name: str
    source: Source
    steps: int
    batch_tokens: int
    optim: OptimSettings = field(default_factory=OptimSettings)


class Trainer:
    """Trains `model` through `phases`. `token_budget` bounds a micro-batch (memory and cache, not the result)."""

    def __init__(
        self,
        model: nn.Module,
        phases: Sequence[Phase],
        *,
        seed: int = 0,
        token_budget: int = 8192,
        dtype: str = "float32",
    ) -> None:
        if not phases or any(p.steps < 0 or p.batch_tokens < 1 for p in phases):
            raise InputError("a warm start needs phases with steps ≥ 0 and batch_tokens ≥ 1")
        if empty := [p.name for p in phases if not callable(p.source) and not p.source]:
            raise InputError("the phase has no examples", where=f"phase {empty[0]!r}")
        self.model, self.phases, self.seed = model, list(phases), seed
        self.token_budget, self.dtype = token_budget, dtype
        self.phase, self.done, self.drawn, self.total = 0, 0, 0, 0
        self._device = next(model.parameters()).device
        self._optimiser = Optimiser(trainable_parameters(model), self.phases[0].optim)
        self._enter()

    @property
    def finished(self) -> bool:
        """Whether all phases have run."""
        return self.phase >= len(self.phases)

    def run(self) -> Iterator[dict[str, float]]:
        """Step until all phases have run, yielding each step's metrics (stop early by leaving the loop)."""
        while not self.finished:
            yield self.step()

    def step(self) -> dict[str, float]:
        """One update; returns loss, grad_norm, lr, tokens and trained_tokens."""
        phase = self.phases[self.phase]
        batch = self._batch(phase)
        rate = learning_rate(phase.optim, self.done, self.done / phase.steps)
        weight = sum(sum(e.weights) for e in batch)
        loss = 0.0
        for micro in _micro(batch, self.token_budget, self._device):
            part = self._nll(micro) / weight
            part.backward()
            loss += float(part.detach())
        norm = self._optimiser.step(loss, rate)
        self.done += 1
        self.total += 1
        out = {"phase": float(self.phase), "step": float(self.total), "loss": loss, "grad_norm": norm, "lr": rate}
        out |= {"tokens": float(sum(len(e.tokens) for e in batch)), "skipped": float(self._optimiser.skipped)}
        out["trained_tokens"] = float(sum(w > 0 for e in batch for w in e.weights))
        self._enter()
        return out

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Held-out loss under the current weights; see the function `evaluate`."""
        return evaluate(self.model, examples, token_budget=self.token_budget, dtype=self.dtype)

    def _enter(self) -> None:
        """Go on to the next phase that has steps left; its optimiser settings apply, the moments are kept."""
        while not self.finished and self.done >= self.phases[self.phase].steps:
            self.phase, self.done, self.drawn = self.phase + 1, 0, 0
        if not self.finished:
            self._optimiser.configure(self.phases[self.phase].optim)

    def _batch(self, phase: Phase) -> list[Example]:
        batch = [self._draw(phase)]
        size = len(batch[0].tokens)
        while True:
            self.drawn += 1
            example = self._draw(phase)
            size += len(example.tokens)
            if size > phase.batch_tokens:
                return batch
            batch.append(example)

    def _draw(self, phase: Phase) -> Example:
        """The next example; drawing it again gives the same one until `drawn` moves on."""
        if callable(phase.source):
            return phase.source(np.random.default_rng([self.seed, self.phase, self.drawn]))
        epoch, place = divmod(self.drawn, len(phase.source))
        return phase.source[_permutation(self.seed, self.phase, epoch, len(phase.source))[place]]

    def _nll(self, examples: Sequence[Example]) -> Tensor:
        logp, _ = token_logprobs(self.model, pack([_row(e) for e in examples]), dtype=self.dtype)
        return -(logp * _weights(examples, self._device)).sum()

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights, moments and the cursor, for `checkpoint.save_checkpoint`."""
        tensors, counters = self._optimiser.snapshot()
        cursor = {"phase": self.phase, "done": self.done, "drawn": self.drawn, "total": self.total, "seed": self.seed}
        return tensors, {**cursor, **counters}

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put back what `snapshot` gave; raises ModelError when it belongs to another model."""
        self._optimiser.restore(tensors, plain)
        self.phase, self.done, self.drawn = int(plain["phase"]), int(plain["done"]), int(plain["drawn"])
        self.total, self.seed = int(plain["total"]), int(plain["seed"])
        self._enter()


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Sequence[Example], *, token_budget: int = 8192, dtype: str = "float32"
) -> dict[str, float]:
    """Weighted mean −log p over the examples (`loss`), its exponential (`perplexity`) and the mean entropy."""
    device = next(model.parameters()).device
    total = weight = entropies = count = 0.0
    for micro in _micro(examples, token_budget, device):
        logp, entropy = token_logprobs(model, pack([_row(e) for e in micro]), dtype=dtype)
        weights = _weights(micro, device)
        total -= float((logp * weights).sum())
        weight += float(weights.sum())
        entropies += float(entropy.sum())
        count += len(entropy)
    if not weight:
        raise InputError("no held-out example has a weight above 0", where="sft.evaluate")
    loss = total / weight
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "entropy": entropies / count, "tokens": count}


def _row(example: Example) -> Row:
    positions = tuple(i for i, w in enumerate(example.weights) if w > 0)
    return Row(example.tokens[: positions[-1] + 1] if positions else (), positions)


def _weights(examples: Sequence[Example], device: torch.device) -> Tensor:
    return torch.tensor([w for e in examples for w in e.weights if w > 0], device=device)


def _micro(examples: Sequence[Example], budget: int, device: torch.device) -> list[list[Example]]:
    return [[examples[i] for i in micro] for micro in micro_batches([_row(e) for e in examples], budget, device)]


@lru_cache(maxsize=8)
def _permutation(seed: int, phase: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, phase, epoch]).permutation(size)
