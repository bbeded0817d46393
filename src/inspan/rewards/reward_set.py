"""The reward of a rollout: the weighted sum of its terms. Contract: a group in, the same rollouts scored, in order.

Invariants
- A rollout that is not trainable (infrastructure, cancelled, a capture that failed) has reward None, which is not 0.
- A failed or timed-out rollout is scored as a failure: outcome terms are 0, process terms are computed.
- A required term that gives no score leaves its rollout unscored. An `optional` one is then skipped for its whole
  group, so that the members of a group are always compared on the same terms.
- A term that raises, or returns what is no number within ±`LARGEST`, gives no score: it is counted, and told once.
  Only on a rollout without an answer (it hit a limit) does a raising outcome term count as 0, else running into limits
  would pay.
- `reward` includes the sum of `turn_rewards`. A weight of exactly 0 means that the term is shown but not needed.
- User terms run off the event loop (plain functions in threads), so that a blocking one stalls nobody.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from inspan.errors import RecipeError
from inspan.rewards.base import ScheduledTerm, Term, TurnTerm, failed, is_process
from inspan.rewards.registry import BUILT_IN, resolve
from inspan.schedule import Schedule, parse
from inspan.trace.records import Rollout, Scored

log = logging.getLogger("inspan.rewards")

LARGEST = 1e30
"""Beyond it the sums over a group, or the learner's float32, would overflow."""


class RewardSection(Protocol):
    """What a recipe says of one term (`inspan.config.sections.Reward` has this shape)."""

    @property
    def use(self) -> str:
        """A built-in name, or `module:function`."""
        ...

    @property
    def weight(self) -> Any:
        """What `inspan.schedule.parse` reads."""
        ...

    @property
    def optional(self) -> bool:
        """Whether the term may be skipped."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """The term's own parameters."""
        ...


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """A term as a recipe uses it. `inline`: cheap and trusted, called on the event loop."""

    name: str
    term: Term
    weight: Schedule
    optional: bool = False
    inline: bool = False


class RewardSet:
    """The terms of a recipe. `failures` counts, by term, how often one gave no score because it was at fault."""

    def __init__(self, terms: Sequence[WeightedTerm], *, timeout_s: float = 600.0) -> None:
        names = [term.name for term in terms]
        if not terms or len(set(names)) < len(names):
            raise RecipeError(f"reward terms are {names}", hint="give at least one term, each with its own name")
        self.terms = tuple(terms)
        self.timeout_s = timeout_s
        self.failures: Counter[str] = Counter()

    @classmethod
    def from_recipe(cls, sections: Iterable[RewardSection], *, python_path: Sequence[str] = ()) -> RewardSet:
        """The terms that a recipe lists. A term that is used twice is called `name#2`. Raises RecipeError."""
        terms: list[WeightedTerm] = []
        for index, section in enumerate(sections):
            seen = sum(term.name.partition("#")[0] == section.use for term in terms)
            name = section.use if not seen else f"{section.use}#{seen + 1}"
            term = resolve(section.use, section.params, python_path=python_path)
            weight = parse(section.weight, where=f"rewards.{index}.weight")
            terms.append(WeightedTerm(name, term, weight, section.optional, inline=section.use in BUILT_IN))
        return cls(terms)

    def weights(self, progress: float) -> dict[str, float]:
        """The weight of each term at `progress`."""
        return {term.name: term.weight.at(progress) for term in self.terms}

    async def score(self, group: Sequence[Rollout], progress: float) -> list[Scored]:
        """Score the rollouts of one group (one task) at `progress` in [0, 1] of the run."""
        weights = self.weights(progress)
        members = [rollout for rollout in group if rollout.trainable]
        terms = [_at(one, progress) for one in self.terms]
        table = await asyncio.gather(*(self._values(rollout, terms) for rollout in members))
        for one in self.terms:
            needed = [term.name for term in self.terms if not term.optional and weights[term.name] != 0.0]
            standing = [values for values in table if all(values[name] is not None for name in needed)]
            if one.optional and any(values[one.name] is None for values in standing):
                for values in table:
                    values[one.name] = None
        found = iter(table)
        return [
            self._sum(rollout, next(found), weights)
            if rollout.trainable
            else Scored(rollout, None, {term.name: None for term in self.terms})
            for rollout in group
        ]

    def _sum(self, rollout: Rollout, values: dict[str, float | None], weights: Mapping[str, float]) -> Scored:
        total = 0.0
        turns: dict[int, float] = {}
        for one in self.terms:
            value, weight = values[one.name], weights[one.name]
            if weight == 0.0:
                continue
            if value is None:
                if one.optional:
                    continue
                return Scored(rollout, None, values)
            total += weight * value
            if isinstance(one.term, TurnTerm):
                for turn, part in one.term.turns(rollout).items():
                    turns[turn] = turns.get(turn, 0.0) + weight * part
        return Scored(rollout, total, values, turns)

    async def _values(self, rollout: Rollout, terms: Sequence[WeightedTerm]) -> dict[str, float | None]:
        values = await asyncio.gather(*(self._value(one, rollout) for one in terms))
        return {one.name: value for one, value in zip(terms, values, strict=True)}

    async def _value(self, one: WeightedTerm, rollout: Rollout) -> float | None:
        if failed(rollout) and not is_process(one.term):
            return 0.0
        if one.inline:
            return self._number(one, one.term(rollout))
        try:
            async with asyncio.timeout(self.timeout_s):
                value = await _off_loop(one.term, _apart(rollout))
        except (Exception, SystemExit) as error:  # whatever a user's function raises: it must not stop the run
            if rollout.answer is None and not is_process(one.term) and not isinstance(error, TimeoutError):
                return 0.0
            return self._fault(one, rollout, f"raised {type(error).__name__}: {error}")
        number = self._number(one, value)
        if number is None and value is not None:
            return self._fault(one, rollout, f"returned {value!r}")
        return number

    @staticmethod
    def _number(one: WeightedTerm, value: Any) -> float | None:
        if isinstance(value, str) or value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if abs(number) <= LARGEST else None

    def _fault(self, one: WeightedTerm, rollout: Rollout, what: str) -> None:
        self.failures[one.name] += 1
        if self.failures[one.name] == 1:
            effect = "the term is skipped for its group" if one.optional else "the rollout stays unscored"
            log.warning(
                "reward %s %s on rollout %s: %s; further ones are counted only", one.name, what, rollout.id, effect
            )


def _at(one: WeightedTerm, progress: float) -> WeightedTerm:
    """A term with its own numbers as they are at `progress`."""
    return replace(one, term=one.term.at(progress)) if isinstance(one.term, ScheduledTerm) else one


def _apart(rollout: Rollout) -> Rollout:
    """A rollout that a user's function may take to pieces: the record stays whole."""
    return replace(
        rollout,
        sessions=list(rollout.sessions),
        nodes=list(rollout.nodes),
        calls=list(rollout.calls),
        tool_events=list(rollout.tool_events),
        metrics=dict(rollout.metrics),
    )


async def _off_loop(term: Term, rollout: Rollout) -> Any:
    function: Any = getattr(term, "func", term)  # under functools.partial
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return await cast("Awaitable[Any]", term(rollout))
    value = await asyncio.to_thread(term, rollout)
    return await value if inspect.isawaitable(value) else value
