"""The learner: chains with credit in, better weights out. It knows no recipe, no harness and no engine.

Contract: `update` sees every trained token of its credits once an epoch. Normalisers are those of the whole minibatch,
whatever the micro-batches; old and reference log-probs are computed before the first sub-step. Equal credits, weights
and seed give equal weights, bit for bit (at one thread count). `version` counts updates: it grows by one with each,
also when a step was skipped, and names the weights that `weights` and `save_weights` publish.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inspan.engine.base import WeightsRef
from inspan.errors import RecipeError
from inspan.learner import metrics as gauges
from inspan.learner.losses import Objective, batch_loss, sequence_log_ratio
from inspan.learner.model import (
    base_of,
    config_json,
    micro_batches,
    published_tensors,
    token_logprobs,
    trainable_parameters,
)
from inspan.learner.objectives import TokenBatch
from inspan.learner.optim import Optimiser, OptimSettings, learning_rate
from inspan.learner.packing import Row, make_row, pack
from inspan.learner.store import write_weights
from inspan.trace.records import ChainCredit


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How an update is cut: `token_budget` bounds a micro-batch (memory), not the result.

    `minibatches` sub-steps an epoch over disjoint groups (rollouts, where there are fewer groups). `temperature` is the
    one the rollouts were sampled at.
    """

    optim: OptimSettings = field(default_factory=OptimSettings)
    epochs: int = 1
    minibatches: int = 1
    token_budget: int = 16384
    temperature: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.epochs, self.minibatches, self.token_budget) < 1:
            raise RecipeError("epochs, minibatches and token_budget must be ≥ 1", where="train")
        if self.temperature <= 0:
            raise RecipeError(f"cannot train on samples of temperature {self.temperature}", where="sampling")
        if self.dtype not in ("float32", "bfloat16"):
            raise RecipeError(f"unknown dtype {self.dtype!r}", where="train", hint="float32 or bfloat16")


@dataclass(slots=True)
class _Batch:
    """Rows with their flat tokens: row i owns `flat[offsets[i] : offsets[i + 1]]`."""

    rows: list[Row]
    offsets: list[int]
    flat: TokenBatch

    def tokens_of(self, rows: Sequence[int]) -> Tensor:
        return torch.cat([torch.arange(self.offsets[i], self.offsets[i + 1]) for i in rows])


class Learner:
    """Trains `model` with `objective`. `reference` (for a KL coefficient) defaults to a copy of the initial weights."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        settings: LearnerSettings | None = None,
        *,
        reference: nn.Module | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.objective = objective
        self.settings = settings or LearnerSettings()
        self.version = 0
        self.optimiser = Optimiser(trainable_parameters(model), self.settings.optim)
        self._clock = clock
        self._device = next(model.parameters()).device
        self._reference = reference
        if objective.needs_reference and reference is None and base_of(model) is model:
            self._reference = copy.deepcopy(model).requires_grad_(False)

    def update(self, credits: Sequence[ChainCredit], progress: float) -> dict[str, float]:
        """One update on the scored chains; `progress` ∈ [0, 1] drives the learning rate. Returns metrics.

        Raises InspanError for a credit that cannot be trained on, or after too many non-finite steps in a row.
        """
        started = self._clock()
        batch = self._flatten(credits)
        tally = gauges.Tally()
        rate = learning_rate(self.settings.optim, self.version, progress)
        if len(batch.flat.behaviour):
            batch.flat = self._with_fixed_logprobs(batch, tally)
            for epoch in range(self.settings.epochs):
                for part in self._minibatches(batch, epoch):
                    self._substep(batch, part, rate, tally)
        self.version += 1
        out = tally.result(batch.flat, [r.tokens for r in batch.rows], seconds=self._clock() - started)
        out |= gauges.staleness(credits, self.version - 1)
        return out | {"lr": rate, "version": float(self.version), "skipped_total": float(self.optimiser.skipped)}

    def misfit(self, credits: Sequence[ChainCredit]) -> tuple[float, int]:
        """The largest |log-prob by the model now − log-prob as recorded|, over the tokens that these weights sampled,
        and how many they are."""
        batch = self._flatten(credits)
        versions = [c.chain.versions[p] for c in credits for p in make_row(c).positions]
        own = torch.tensor([version == self.version for version in versions], dtype=torch.bool, device=self._device)
        if not own.any():
            return 0.0, 0
        now = self._logprobs(self.model, batch, range(len(batch.rows)), gauges.Tally())
        return float((now - batch.flat.behaviour)[own].abs().max()), int(own.sum())

    def _flatten(self, credits: Sequence[ChainCredit]) -> _Batch:
        rows, offsets, kept = [], [0], []
        for credit in credits:
            row = make_row(credit)
            if row.positions:
                rows.append(row)
                offsets.append(offsets[-1] + len(row.positions))
                kept.append((credit, row.positions))
        rollouts: dict[tuple[int, int], int] = {}

        def column(values: list[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        flat = TokenBatch(
            behaviour=column([c.chain.logprobs[p] for c, ps in kept for p in ps]),
            advantage=column([c.advantages[p] for c, ps in kept for p in ps]),
            weight=column([c.weights[p] for c, ps in kept for p in ps]),
            rollout=column(
                [rollouts.setdefault((c.group, c.rollout), len(rollouts)) for c, ps in kept for _ in ps], torch.int64
            ),
            group=column([c.group for c, ps in kept for _ in ps], torch.int64),
        )
        return _Batch(rows, offsets, flat)

    def _with_fixed_logprobs(self, batch: _Batch, tally: gauges.Tally) -> TokenBatch:
        """Add old and reference log-probs where the objective needs them."""
        flat, everything = batch.flat, range(len(batch.rows))
        if self.objective.needs_old:
            flat = replace(flat, old=self._logprobs(self.model, batch, everything, tally))
        if self.objective.needs_reference:
            flat = replace(flat, reference=self._reference_logprobs(batch, everything, tally))
        return flat

    def _reference_logprobs(self, batch: _Batch, rows: Sequence[int], tally: gauges.Tally) -> Tensor:
        if self._reference is not None:
            return self._logprobs(self._reference, batch, rows, tally)
        with self.model.disable_adapter():  # type: ignore[operator]  # peft: the weights before any update
            return self._logprobs(self.model, batch, rows, tally)

    @torch.no_grad()
    def _logprobs(self, model: nn.Module, batch: _Batch, rows: Sequence[int], tally: gauges.Tally) -> Tensor:
        """Log-probs of the rows' trained tokens, in order of the rows; no gradient."""
        out = torch.empty(batch.offsets[-1], device=self._device)
        for micro in self._micro(batch, rows):
            logp, _ = self._forward(model, batch, micro, tally)
            out[batch.tokens_of(micro).to(self._device)] = logp
        return out[batch.tokens_of(rows).to(self._device)]

    def _forward(
        self, model: nn.Module, batch: _Batch, micro: Sequence[int], tally: gauges.Tally
    ) -> tuple[Tensor, Tensor]:
        packed = pack([batch.rows[i] for i in micro])
        tally.processed += len(packed.tokens)
        return token_logprobs(model, packed, temperature=self.settings.temperature, dtype=self.settings.dtype)

    def _micro(self, batch: _Batch, rows: Sequence[int]) -> list[list[int]]:
        chosen = [batch.rows[i] for i in rows]
        return [[rows[i] for i in m] for m in micro_batches(chosen, self.settings.token_budget, self._device)]

    def _minibatches(self, batch: _Batch, epoch: int) -> list[list[int]]:
        """Rows of each sub-step: whole groups, or whole rollouts where there are fewer groups than sub-steps."""
        count = self.settings.minibatches
        if count == 1:
            return [list(range(len(batch.rows)))]
        first = torch.tensor(batch.offsets[:-1])
        unit = batch.flat.group.cpu()[first].tolist()
        if len(set(unit)) < count:
            unit = batch.flat.rollout.cpu()[first].tolist()
        generator = torch.Generator().manual_seed((self.settings.seed << 24) + (self.version << 8) + epoch)
        names = sorted(set(unit))
        order = [names[i] for i in torch.randperm(len(names), generator=generator).tolist()]
        place = {name: i % count for i, name in enumerate(order)}
        parts = [[i for i, u in enumerate(unit) if place[u] == part] for part in range(count)]
        return [part for part in parts if part]

    def _substep(self, batch: _Batch, part: Sequence[int], rate: float, tally: gauges.Tally) -> None:
        index = batch.tokens_of(part).to(self._device)
        flat = batch.flat.select(index)
        scale = torch.empty_like(batch.flat.advantage)
        scale[index] = self.objective.scales(flat)
        whole = batch.flat
        if self.objective.needs_sequence:
            sequence = torch.zeros_like(whole.behaviour)
            sequence[index] = sequence_log_ratio(self._logprobs(self.model, batch, part, tally), flat)
            whole = replace(whole, sequence=sequence)
        total = 0.0
        for micro in self._micro(batch, [i for i in part if self._matters(batch, i)]):
            chosen = batch.tokens_of(micro).to(self._device)
            logp, entropy = self._forward(self.model, batch, micro, tally)
            tokens = whole.select(chosen)
            loss, terms = batch_loss(self.objective, logp, tokens, scale[chosen])
            loss.backward()
            total += float(loss.detach())
            tally.tokens(logp.detach(), entropy, tokens, terms)
        norm = self.optimiser.step(total, rate) if tally.pending else 0.0
        tally.step(total, norm)

    def _matters(self, batch: _Batch, row: int) -> bool:
        """Whether a row can have a loss: chains without any advantage are skipped where the objective allows it."""
        if not self.objective.zero_without_advantage:
            return True
        return bool((batch.flat.advantage[batch.offsets[row] : batch.offsets[row + 1]] != 0).any())

    def weights(self) -> WeightsRef:
        """The current weights as private copies in memory, adapters merged, under the base model's names."""
        return WeightsRef(self.version, tensors=dict(published_tensors(self.model)))

    def save_weights(
        self, directory: str | Path, version: int | None = None, *, beside: Sequence[Path] = ()
    ) -> WeightsRef:
        """Publish the current weights under `directory`/v<version>, which appears only when complete.

        `beside` are files to copy into it, such as the tokenizer's. Raises StoreError when the disk is full or the
        version exists already.
        """
        number = self.version if version is None else version
        path = write_weights(directory, number, published_tensors(self.model), config_json(self.model), beside)
        return WeightsRef(number, path=str(path))

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint holds of the learner: tensors (not copied) and plain data."""
        tensors, counters = self.optimiser.snapshot()
        return tensors, {"version": self.version, **counters}

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put back what `snapshot` gave; raises ModelError when it belongs to another model."""
        self.optimiser.restore(tensors, plain)
        self.version = int(plain["version"])
