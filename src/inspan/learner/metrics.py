"""What an update reports. Contract: means are over the trained tokens of all sub-steps, each token once a sub-step;
every value is a float; nothing here feeds back into training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inspan.learner.losses import kl_terms
from inspan.learner.objectives import Terms, TokenBatch
from inspan.learner.packing import unique_tokens
from inspan.trace.records import ChainCredit, Tokens


class Tally:
    """Collects over the micro-batches of an update."""

    def __init__(self) -> None:
        self.processed = 0  # tokens that forward passes computed
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._parts: dict[str, list[Tensor]] = {}
        self.pending = False  # whether gradients wait for a step

    def tokens(self, logp: Tensor, entropy: Tensor, batch: TokenBatch, terms: Terms) -> None:
        """The trained tokens of one micro-batch."""
        self.pending = True
        gap = logp - batch.behaviour
        found = {"ratio": terms.ratio, "clip_share": terms.clipped, "masked_share": terms.masked, "entropy": entropy}
        found |= {"logp_gap": gap.abs(), "kl": kl_terms("k3", batch.behaviour, logp)}
        if batch.reference is not None:
            found["kl_reference"] = kl_terms("k1", logp, batch.reference)
        for name, values in found.items():
            self._parts.setdefault(name, []).append(values.detach().float())

    def step(self, loss: float, norm: float) -> None:
        """A sub-step was taken (or skipped)."""
        self.pending = False
        self._losses.append(loss)
        self._norms.append(norm)

    def result(self, batch: TokenBatch, rows: Sequence[Tokens], *, seconds: float) -> dict[str, float]:
        """The metrics of the update, whose trained tokens are `batch` and whose chains are `rows`."""
        trained = len(batch.behaviour)
        out = {
            "loss": _mean(self._losses),
            "grad_norm": _mean(self._norms),
            "steps": float(len(self._losses)),
            "trained_tokens": float(trained),
            "processed_tokens": float(self.processed),
            "unique_tokens": float(unique_tokens(rows)),
            "chain_tokens": float(sum(len(r) for r in rows)),
            "seconds": seconds,
            "tokens_per_s": trained / seconds if seconds > 0 else 0.0,
            "advantage_mean": float(batch.advantage.mean()) if trained else 0.0,
            "advantage_std": float(batch.advantage.std(correction=0)) if trained else 0.0,
        }
        joined = {name: torch.cat(parts) for name, parts in self._parts.items()}
        out |= {name if name != "ratio" else "ratio_mean": float(v.mean()) for name, v in joined.items()}
        if "ratio" in joined:
            out["ratio_max"] = float(joined["ratio"].max())
        return out


def staleness(credits: Sequence[ChainCredit], version: int) -> dict[str, float]:
    """Versions between sampling and training, over trained tokens: mean and largest."""
    ages = [version - v for c in credits for v, w in zip(c.chain.versions, c.weights, strict=True) if w and v >= 0]
    return {"staleness_mean": _mean(ages), "staleness_max": float(max(ages, default=0))}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
