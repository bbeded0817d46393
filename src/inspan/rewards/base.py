"""What a reward term is. Contract: a term is one reason to pay or fine; it sees a finished rollout and nothing else.

A term returns a finite number, or None for "no score" (never 0 in its place). It may be a plain or an async function.
*Outcome* terms (the default, also for a user's own) judge the answer: they are 0, and not called, when the harness
failed or timed out. *Process* terms judge how the rollout went, and are computed for failures too, so that a fine
cannot be escaped by breaking the run. *Turn* terms can also say which turn earned what. *Scheduled* terms have numbers
that move with the run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from inspan.trace.records import Rollout, Terminal

F = TypeVar("F", bound=Callable[..., Any])


class Term(Protocol):
    """One reason to pay or fine: a rollout in, a number or None out."""

    def __call__(self, rollout: Rollout, /) -> float | Awaitable[float | None] | None:
        """Score one rollout."""
        ...


@runtime_checkable
class TurnTerm(Protocol):
    """A term that can be split over turns; the parts sum to the whole."""

    def __call__(self, rollout: Rollout, /) -> float:
        """The whole."""
        ...

    def turns(self, rollout: Rollout, /) -> dict[int, float]:
        """The parts: index of the call in the rollout → what it earned."""
        ...


@runtime_checkable
class ScheduledTerm(Protocol):
    """A term whose own numbers move with the run."""

    def at(self, progress: float, /) -> Term:
        """The term as it is at `progress` in [0, 1]."""
        ...


def process(term: F) -> F:
    """Mark a term as judging the process: it is computed for failed and timed-out rollouts too."""
    term.process = True  # type: ignore[attr-defined]
    return term


def is_process(term: object) -> bool:
    """Whether a term judges the process."""
    return bool(getattr(term, "process", False))


def failed(rollout: Rollout) -> bool:
    """Whether the harness failed after the model had sampled: outcome terms are 0."""
    return rollout.terminal in (Terminal.FAILED, Terminal.TIMED_OUT)
