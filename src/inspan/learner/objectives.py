"""The policy objectives: pure functions from log-probabilities and advantages to one loss term a token.

Contract: every function takes `logp` (the log-probs under the weights being trained, shape (T,), with gradient) and a
`TokenBatch` of the same T tokens, and returns `Terms`. A term is *minimised*; it is neither weighted nor normalised:
`inspan.learner.losses` does both, over the whole batch, so that micro-batches add up to the batch.
Only sampled tokens that are trained are in a batch. ρ is π_θ/π_behaviour unless said otherwise; the behaviour policy is
what the engine recorded. `TokenBatch.old` (tis, icepop) and `TokenBatch.sequence` (gspo) are computed by the learner.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

LOG_RATIO_BOUND = 30.0
"""Log-ratios are clamped to ± this before `exp`, so that an outlier (e^30) cannot turn a masked token into inf·0."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The trained tokens of a batch, as flat vectors of shape (T,); `rollout` and `group` are ids (int64)."""

    behaviour: Tensor  # log-probs that the engine recorded when it sampled
    advantage: Tensor
    weight: Tensor  # > 0
    rollout: Tensor  # tells the rollouts of the batch apart, over all their chains
    group: Tensor
    old: Tensor | None = None  # the learner's own log-probs before the first sub-step
    reference: Tensor | None = None  # log-probs of the reference policy
    sequence: Tensor | None = None  # per token: the mean log-ratio of its whole rollout, no gradient

    def select(self, index: Tensor) -> TokenBatch:
        """The tokens at `index` (int64), in that order."""
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(self, **{name: values[index] for name, values in present.items()})

    def with_advantage(self, advantage: Tensor) -> TokenBatch:
        """The same tokens with other advantages."""
        return replace(self, advantage=advantage)


@dataclass(frozen=True, slots=True)
class Terms:
    """Per-token results, shape (T,). `loss` carries the gradient; the rest is detached, for metrics.

    `clipped`: a ratio of the token was cut at a bound. `masked`: the token's policy gradient is zero because of that.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    masked: Tensor


def ratio_of(new: Tensor, base: Tensor) -> Tensor:
    """exp(new − base), with the log-ratio clamped to ±`LOG_RATIO_BOUND`."""
    return torch.exp((new - base).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def _ppo(ratio: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """−min(ρA, clip(ρ, 1−low, 1+high)A), the tokens outside the range, and those whose gradient that cuts."""
    cut = ratio.clamp(1 - low, 1 + high) * advantage
    whole = ratio * advantage
    outside = (ratio < 1 - low) | (ratio > 1 + high)
    return -torch.minimum(whole, cut), outside.detach(), (outside & (cut < whole)).detach()


def grpo(logp: Tensor, batch: TokenBatch, *, eps: float = 0.2, eps_high: float | None = None) -> Terms:
    """PPO's clipped surrogate, meant for the mean per sequence (GRPO, arXiv 2402.03300).

    `eps_high` (DAPO, 2503.14476) widens the upper side only; None: the same as `eps`.
    """
    ratio = ratio_of(logp, batch.behaviour)
    loss, outside, masked = _ppo(ratio, batch.advantage, eps, eps if eps_high is None else eps_high)
    return Terms(loss, ratio.detach(), outside, masked)


def dr_grpo(logp: Tensor, batch: TokenBatch, *, eps: float = 0.2, eps_high: float | None = None) -> Terms:
    """`grpo` for a constant normaliser instead of 1/|o| (Dr. GRPO, arXiv 2503.20783); credit without the std."""
    return grpo(logp, batch, eps=eps, eps_high=eps_high)


def kimi(logp: Tensor, batch: TokenBatch, *, alpha: float = 0.5, beta: float = 2.0, tau: float = 1e-3) -> Terms:
    """−Clip(ρ, α, β)·A + τ(log ρ)² (Kimi K2.5, arXiv 2602.02276; α, β, τ unpublished: our defaults).

    Outside [α, β] the policy gradient is zero whatever the sign of A; the τ term is not masked. The report's text
    speaks of the log-ratio, its formula of the ratio: the ratio is what we bound.
    """
    ratio = ratio_of(logp, batch.behaviour)
    outside = ((ratio < alpha) | (ratio > beta)).detach()
    loss = -ratio.clamp(alpha, beta) * batch.advantage + tau * (logp - batch.behaviour).square()
    return Terms(loss, ratio.detach(), outside, outside)


def cispo(logp: Tensor, batch: TokenBatch, *, low: float = 0.0, high: float = 5.0) -> Terms:
    """−sg(clip(ρ, low, high))·A·log π_θ (CISPO, arXiv 2506.13585): no token loses its gradient.

    `high` 4–8, no effective lower bound; Context-1 uses [0, 5].
    """
    ratio = ratio_of(logp, batch.behaviour).detach()
    outside = (ratio < low) | (ratio > high)
    return Terms(-ratio.clamp(low, high) * batch.advantage * logp, ratio, outside, torch.zeros_like(outside))


def gspo(logp: Tensor, batch: TokenBatch, *, eps: float = 3e-4, eps_high: float = 4e-4) -> Terms:
    """The clipped surrogate on the *sequence* ratio s = exp(mean log ρ over the rollout) (GSPO, arXiv 2507.18071).

    A sequence is a rollout: its sampled tokens over all its chains. `batch.sequence` holds log s without gradient, so
    that a rollout may span micro-batches; each token carries its own share of the gradient (the paper's GSPO-token
    form, equal to GSPO where a rollout's tokens share one advantage).
    """
    if batch.sequence is None:
        raise ValueError("gspo needs batch.sequence (log of the sequence ratio per token)")
    share = torch.exp(logp - logp.detach())  # 1 in value, ∇log π in gradient
    ratio = ratio_of(batch.sequence, torch.zeros_like(batch.sequence)) * share
    loss, outside, masked = _ppo(ratio, batch.advantage, eps, eps_high)
    return Terms(loss, ratio.detach(), outside, masked)


def tis(logp: Tensor, batch: TokenBatch, *, cap: float = 2.0, eps: float = 0.2, eps_high: float | None = None) -> Terms:
    """min(π_old/π_sampler, cap) in front of a PPO term on π_θ/π_old: truncated importance sampling.

    The weight mends the gap between the sampler's and the learner's numerics or versions; the clip bounds the update.
    """
    old = _old(batch, "tis")
    weight = ratio_of(old, batch.behaviour).detach()
    loss, outside, masked = _ppo(ratio_of(logp, old), batch.advantage, eps, eps if eps_high is None else eps_high)
    ratio = ratio_of(logp, batch.behaviour).detach()
    return Terms(weight.clamp(max=cap) * loss, ratio, outside | (weight > cap), masked)


def icepop(
    logp: Tensor,
    batch: TokenBatch,
    *,
    alpha: float = 0.5,
    beta: float = 5.0,
    eps: float = 0.2,
    eps_high: float | None = None,
) -> Terms:
    """As `tis`, but a token whose π_old/π_sampler lies outside [α, β] is dropped instead of truncated (IcePop)."""
    old = _old(batch, "icepop")
    weight = ratio_of(old, batch.behaviour).detach()
    dropped = (weight < alpha) | (weight > beta)
    loss, outside, masked = _ppo(ratio_of(logp, old), batch.advantage, eps, eps if eps_high is None else eps_high)
    ratio = ratio_of(logp, batch.behaviour).detach()
    return Terms(weight.masked_fill(dropped, 0.0) * loss, ratio, outside | dropped, masked | dropped)


def _old(batch: TokenBatch, name: str) -> Tensor:
    if batch.old is None:
        raise ValueError(f"{name} needs batch.old (the learner's log-probs before the first sub-step)")
    return batch.old
