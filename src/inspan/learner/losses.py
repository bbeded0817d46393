"""From per-token terms to one number: KL against a reference, aggregation, and the registry of objectives.

Contract: `scales` are computed over the whole (mini-)batch *before* it is cut into micro-batches; the loss is
Σ_t scale_t · weight_t · term_t, so the losses and gradients of the micro-batches sum to those of the batch exactly.
Weights scale a token's term and do not enter a normaliser. A token is in the batch once, a rollout counts once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from inspan.errors import RecipeError
from inspan.learner import objectives
from inspan.learner.objectives import LOG_RATIO_BOUND, Terms, TokenBatch

AGGREGATIONS = ("group_tokens", "token", "rollout", "constant")
ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True)
class Spec:
    """What the learner must know of an objective: its function, natural aggregation and needs."""

    function: Callable[..., Terms]
    aggregation: str
    needs_old: bool = False
    needs_sequence: bool = False


OBJECTIVES: dict[str, Spec] = {
    "grpo": Spec(objectives.grpo, "rollout"),
    "dr_grpo": Spec(objectives.dr_grpo, "constant"),
    "kimi": Spec(objectives.kimi, "group_tokens"),
    "cispo": Spec(objectives.cispo, "token"),
    "gspo": Spec(objectives.gspo, "rollout", needs_sequence=True),
    "tis": Spec(objectives.tis, "token", needs_old=True),
    "icepop": Spec(objectives.icepop, "token", needs_old=True),
}


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective with its parameters, aggregation and KL term. `length` is the constant of "constant"."""

    name: str
    spec: Spec
    aggregation: str
    params: Mapping[str, float] = field(default_factory=dict)
    length: float = 1024.0
    kl_estimator: str = "k1"
    kl_coef: float = 0.0

    @property
    def needs_old(self) -> bool:
        """Whether the learner must recompute its own log-probs before the first sub-step."""
        return self.spec.needs_old

    @property
    def needs_sequence(self) -> bool:
        """Whether the ratio of a token depends on its whole rollout."""
        return self.spec.needs_sequence

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference policy are needed."""
        return self.kl_coef != 0.0

    @property
    def zero_without_advantage(self) -> bool:
        """Whether a token with advantage 0 has no loss and no gradient, so that its chain may be skipped."""
        tau = self.params.get("tau", 1e-3) if self.name == "kimi" else 0.0
        return tau == 0.0 and not self.needs_reference

    def terms(self, logp: Tensor, batch: TokenBatch) -> Terms:
        """Per-token terms with the KL term in its place: k1 in the advantage (no gradient), k2 and k3 in the loss."""
        if not self.needs_reference:
            return self.spec.function(logp, batch, **self.params)
        if batch.reference is None:
            raise ValueError("a KL coefficient needs batch.reference (log-probs of the reference policy)")
        if self.kl_estimator == "k1":
            k1 = kl_terms("k1", logp.detach(), batch.reference)
            return self.spec.function(logp, batch.with_advantage(batch.advantage - self.kl_coef * k1), **self.params)
        terms = self.spec.function(logp, batch, **self.params)
        penalty = self.kl_coef * kl_terms(self.kl_estimator, logp, batch.reference)
        return Terms(terms.loss + penalty, terms.ratio, terms.clipped, terms.masked)

    def scales(self, batch: TokenBatch) -> Tensor:
        """Normalisers per token, over the whole batch; shape (T,)."""
        return scales(batch, self.aggregation, length=self.length)


def make_objective(
    name: str,
    params: Mapping[str, float] | None = None,
    *,
    aggregation: str | None = None,
    length: float = 1024.0,
    kl_estimator: str = "k1",
    kl_coef: float = 0.0,
) -> Objective:
    """An objective by name. `aggregation` None is the objective's own (`OBJECTIVES`).

    Raises RecipeError for an unknown name, parameter, aggregation or estimator, naming the nearest known one.
    """
    _known(name, tuple(OBJECTIVES), "objective")
    spec = OBJECTIVES[name]
    allowed = tuple(inspect.signature(spec.function).parameters)[2:]
    for key in params or {}:
        _known(key, allowed, f"parameter of objective {name!r}")
    chosen = spec.aggregation if aggregation is None else _known(aggregation, AGGREGATIONS, "aggregation")
    _known(kl_estimator, ESTIMATORS, "KL estimator")
    if kl_coef < 0 or length <= 0:
        raise RecipeError(f"kl coefficient {kl_coef} must be ≥ 0 and length {length} > 0", where="train")
    return Objective(name, spec, chosen, dict(params or {}), length, kl_estimator, kl_coef)


def _known(value: str, known: tuple[str, ...], what: str) -> str:
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? known: {', '.join(known)}" if near else "it has none"
    raise RecipeError(f"unknown {what} {value!r}", where="train", hint=hint)


def scales(batch: TokenBatch, aggregation: str, *, length: float = 1024.0) -> Tensor:
    """Normaliser of each token, shape (T,); N, R, G count tokens, rollouts and groups that have trained tokens.

    `group_tokens`: 1/(G·N_group), Kimi's N inside the mean over prompts. `token`: 1/N (DAPO, CISPO). `rollout`:
    1/(R·N_rollout), GRPO's mean of means. `constant`: 1/(R·length), Dr. GRPO.
    """
    if aggregation == "token":
        return torch.full_like(batch.advantage, 1.0 / max(1, len(batch.advantage)))
    unit = batch.group if aggregation == "group_tokens" else batch.rollout
    _, inverse, counts = torch.unique(unit, return_inverse=True, return_counts=True)
    if aggregation == "constant":
        return torch.full_like(batch.advantage, 1.0 / (max(1, len(counts)) * length))
    return 1.0 / (len(counts) * counts[inverse].to(batch.advantage.dtype))


def kl_terms(estimator: str, logp: Tensor, reference: Tensor) -> Tensor:
    """Estimators of KL(π_θ ‖ π_ref) per token, r = π_ref/π_θ: k1 = −log r, k2 = ½(log r)², k3 = r − 1 − log r.

    Source: Schulman, "Approximating KL divergence" (2020). k3's variance explodes as the policies part, k2 is biased.
    """
    log_r = reference - logp
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.exp(log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) - 1 - log_r


def sequence_log_ratio(logp: Tensor, batch: TokenBatch) -> Tensor:
    """log s per token: the mean of log ρ over all trained tokens of the token's rollout; shape (T,), no gradient."""
    _, inverse, counts = torch.unique(batch.rollout, return_inverse=True, return_counts=True)
    log_ratio = (logp - batch.behaviour).detach()
    sums = torch.zeros(len(counts), dtype=log_ratio.dtype, device=log_ratio.device).index_add_(0, inverse, log_ratio)
    return (sums / counts)[inverse]


def batch_loss(objective: Objective, logp: Tensor, batch: TokenBatch, scale: Tensor) -> tuple[Tensor, Terms]:
    """Σ_t scale_t · weight_t · term_t of a (micro-)batch and its terms. `scale` comes from the whole batch."""
    terms = objective.terms(logp, batch)
    return (scale * batch.weight * terms.loss).sum(), terms


def describe(objective: Objective) -> dict[str, Any]:
    """The objective as plain data, for the resolved recipe and checkpoints."""
    defaults = inspect.signature(objective.spec.function).parameters
    params = {k: objective.params.get(k, p.default) for k, p in list(defaults.items())[2:]}
    kl = {"estimator": objective.kl_estimator, "coef": objective.kl_coef}
    return {"name": objective.name, "params": params, "aggregation": objective.aggregation, "kl": kl}
