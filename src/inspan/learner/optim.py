"""The optimiser and its schedule: AdamW without decay on vectors, warmup, then constant, linear or cosine.

Contract: the learning rate is a pure function of (updates done, progress), so that a resumed run needs nothing else.
A step with a non-finite loss or gradient changes nothing and is counted; too many in a row raise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inspan.errors import InspanError, ModelError, RecipeError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW and what surrounds it. `warmup` counts updates; `max_bad_steps` consecutive bad steps raise."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 0
    schedule: str = "constant"
    floor: float = 0.0  # lr at the end of a linear or cosine schedule, as a share of `lr`
    grad_clip: float = 1.0  # 0: no clipping
    max_bad_steps: int = 5

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise RecipeError(f"unknown schedule {self.schedule!r}", where="train", hint=f"known: {SCHEDULES}")
        if self.lr <= 0 or self.warmup < 0 or self.grad_clip < 0:
            raise RecipeError("lr must be > 0, warmup and grad_clip ≥ 0", where="train")


def learning_rate(settings: OptimSettings, done: int, progress: float) -> float:
    """The rate of the update after `done` others, at `progress` ∈ [0, 1] of the run."""
    warm = min(1.0, (done + 1) / settings.warmup) if settings.warmup else 1.0
    p = min(1.0, max(0.0, progress))
    fall = {"constant": 1.0, "linear": 1 - p, "cosine": 0.5 * (1 + math.cos(math.pi * p))}[settings.schedule]
    return settings.lr * warm * (settings.floor + (1 - settings.floor) * fall)


class Optimiser:
    """AdamW over named parameters with gradient clipping and the guard against non-finite steps."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimSettings) -> None:
        if not parameters:
            raise InspanError("the model has no trainable parameters", where="learner")
        self.settings = settings
        self.parameters = dict(parameters)
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        vectors = [p for p in self.parameters.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        kind = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps, "fused": True}
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], **kind)
        self.bad_steps = 0  # in a row
        self.skipped = 0  # in all

    def step(self, loss: float, rate: float) -> float:
        """Take one step on the accumulated gradients, then clear them; returns the gradient norm before clipping.

        A non-finite loss or norm leaves weights and moments as they are. Raises InspanError after
        `max_bad_steps` of those in a row.
        """
        clip = self.settings.grad_clip or math.inf
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), clip))
        if math.isfinite(loss) and math.isfinite(norm):
            for group in self.adam.param_groups:
                group["lr"] = rate
            self.adam.step()
            self.bad_steps = 0
        else:
            self.bad_steps += 1
            self.skipped += 1
        self.adam.zero_grad(set_to_none=True)
        if self.bad_steps >= max(1, self.settings.max_bad_steps):
            raise InspanError(
                f"{self.bad_steps} steps in a row had a non-finite loss or gradient (loss {loss}, norm {norm})",
                where="learner",
                hint="lower train.lr, or resume from an earlier checkpoint",
            )
        return norm

    def configure(self, settings: OptimSettings) -> None:
        """Go on under other settings; the moments are kept."""
        self.settings = settings
        for group in self.adam.param_groups:
            vectors = all(p.dim() <= 1 for p in group["params"])
            group |= {"betas": settings.betas, "eps": settings.eps}
            group["weight_decay"] = 0.0 if vectors else settings.weight_decay

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Parameters and moments (tensors, not copied) and the counters, for a checkpoint."""
        tensors = {f"weights/{name}": p.detach() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = self.adam.state.get(parameter, {})
            tensors |= {f"adam/{key}/{name}": value for key, value in moments.items()}
        return tensors, {"bad_steps": self.bad_steps, "skipped": self.skipped}

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Put back what `snapshot` gave; raises ModelError, changing nothing, when it is of another model."""
        weights = {k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")}
        _same_shapes(self.parameters, weights)
        self.adam.state.clear()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        for key, value in tensors.items():
            if key.startswith("adam/"):
                moment, _, name = key.removeprefix("adam/").partition("/")
                parameter = self.parameters[name]
                self.adam.state[parameter][moment] = value.clone().to("cpu" if moment == "step" else parameter.device)
        self.bad_steps, self.skipped = int(counters["bad_steps"]), int(counters["skipped"])


def _same_shapes(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    hint = "is it a checkpoint of this model?"
    if odd := sorted(set(own) ^ set(other)):
        raise ModelError(f"{len(odd)} weights do not match, e.g. {odd[0]!r}", where="learner", hint=hint)
    for name, parameter in own.items():
        if parameter.shape != other[name].shape:
            what = f"{name} has shape {tuple(other[name].shape)}, expected {tuple(parameter.shape)}"
            raise ModelError(what, where="learner", hint=hint)
