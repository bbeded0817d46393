"""Which task comes next. Contract: one interface; all randomness from the given generator, all state in `state()`.

`draw` hands out tasks, `report` tells how a group on one of them went. A sampler that is restored from another's state
goes on exactly as that one would have. Rules: `uniform`; `failure`, in proportion to 1 - success (K2.5 report);
`hops`, a curriculum in phases (Context-1 report); `harder`, harder ones more often later (Composer 2 report, by turns
and thinking tokens). `uniform` and `hops` repeat no task before the epoch ends; the weighted rules repeat by their
nature, but never before `spacing` other tasks have been drawn.
"""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from inspan.config.recipe import nearest
from inspan.errors import CheckpointError, RecipeError, TaskError
from inspan.tasks.base import Task


class Sampler(ABC):
    """Base of the rules. `progress` in [0, 1] is the share of the run that is done."""

    def __init__(self, tasks: Sequence[Task], rng: random.Random) -> None:
        if not tasks:
            raise TaskError("there is no task to sample", hint="the task set is empty")
        self._tasks = {task.id: task for task in tasks}
        if len(self._tasks) < len(tasks):
            raise TaskError("two tasks have the same id", hint="give each task its own id")
        self._ids = list(self._tasks)
        self._rng = rng

    def draw(self, count: int, progress: float = 0.0) -> list[Task]:
        """The next `count` tasks."""
        if count < 0 or not 0.0 <= progress <= 1.0:
            raise ValueError(f"draw({count}, {progress})")
        return [self._tasks[self._next(progress)] for _ in range(count)]

    def report(self, task: str, success: float, *, turns: float = 0.0, thinking_tokens: float = 0.0) -> None:
        """How a group on a task went: mean success in [0, 1], mean turns and thinking tokens of its rollouts.

        An unknown task raises ValueError.
        """
        if task not in self._tasks or not 0.0 <= success <= 1.0:
            raise ValueError(f"report({task!r}, {success})")
        self._note(task, success, turns, thinking_tokens)

    def state(self) -> dict[str, Any]:
        """All that the next draws depend on, as plain JSON data."""
        version, internal, gauss = self._rng.getstate()
        rng = [version, list(internal), gauss]
        return {"rule": type(self).__name__, "tasks": self._digest(), "rng": rng, "own": self._state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state; CheckpointError when it is of another rule or another task set."""
        for key, mine in (("rule", type(self).__name__), ("tasks", self._digest())):
            if state.get(key) != mine:
                raise CheckpointError(
                    f"the sampler's {key} changed ({state.get(key)!r}, now {mine!r})",
                    where="task sampler",
                    hint="resume with the recipe and the tasks of the checkpoint",
                )
        version, internal, gauss = state["rng"]
        self._rng.setstate((version, tuple(internal), gauss))
        self._restore(state["own"])

    def _digest(self) -> str:
        return hashlib.sha256("\n".join(self._ids).encode()).hexdigest()[:16]

    @abstractmethod
    def _next(self, progress: float) -> str: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _restore(self, own: dict[str, Any]) -> None: ...

    @abstractmethod
    def _note(self, task: str, success: float, turns: float, thinking_tokens: float) -> None: ...


class Epochs(Sampler):
    """Base of the rules that go through the tasks in epochs, whatever the reports say."""

    def _note(self, task: str, success: float, turns: float, thinking_tokens: float) -> None:
        del task, success, turns, thinking_tokens


class Uniform(Epochs):
    """Shuffled epochs: every task once before any comes again."""

    def __init__(self, tasks: Sequence[Task], rng: random.Random) -> None:
        super().__init__(tasks, rng)
        self._waiting: list[str] = []

    def _next(self, progress: float) -> str:
        if not self._waiting:
            self._waiting = self._rng.sample(self._ids, len(self._ids))
        return self._waiting.pop()

    def _state(self) -> dict[str, Any]:
        return {"waiting": list(self._waiting)}

    def _restore(self, own: dict[str, Any]) -> None:
        self._waiting = list(own["waiting"])


class Hops(Epochs):
    """Phases by hops (`task.meta["hops"]`): few hops first. Each phase is sampled in shuffled epochs.

    `phases` are (until, low, high): while progress < `until`, tasks of `low` to `high` hops. By default two phases of
    half the run each: the lower half of the numbers of hops that occur, then the upper one.
    """

    def __init__(
        self, tasks: Sequence[Task], rng: random.Random, *, phases: Sequence[tuple[float, int, int]] | None = None
    ) -> None:
        super().__init__(tasks, rng)
        hops = {task.id: _hops(task) for task in tasks}
        self._phases = [tuple(phase) for phase in phases] if phases else _two_phases(sorted(set(hops.values())))
        ends = [until for until, _, _ in self._phases]
        if ends != sorted(ends) or ends[-1] != 1.0 or ends[0] <= 0:
            raise RecipeError(
                f"phases end at {ends}", where="tasks.sampler", hint="ascending shares, the last being 1.0"
            )
        self._members = [[id_ for id_ in self._ids if low <= hops[id_] <= high] for _, low, high in self._phases]
        for (_, low, high), members in zip(self._phases, self._members, strict=True):
            if not members:
                raise TaskError(f"no task has {low} to {high} hops", where="tasks.sampler", hint="change the phases")
        self._waiting: list[list[str]] = [[] for _ in self._phases]

    def _next(self, progress: float) -> str:
        phase = next((i for i, (until, _, _) in enumerate(self._phases) if progress < until), len(self._phases) - 1)
        if not self._waiting[phase]:
            self._waiting[phase] = self._rng.sample(self._members[phase], len(self._members[phase]))
        return self._waiting[phase].pop()

    def _state(self) -> dict[str, Any]:
        return {"waiting": [list(ids) for ids in self._waiting]}

    def _restore(self, own: dict[str, Any]) -> None:
        self._waiting = [list(ids) for ids in own["waiting"]]


def _hops(task: Task) -> int:
    hops = task.meta.get("hops")
    if isinstance(hops, bool) or not isinstance(hops, int):
        raise TaskError(
            f"hops is {hops!r}", where=f"task {task.id!r}", hint='give "hops" in meta, or use another sampler'
        )
    return hops


def _two_phases(hops: list[int]) -> list[tuple[float, int, int]]:
    if len(hops) < 2:
        raise TaskError(f"all tasks have {hops[0]} hops", where="tasks.sampler", hint='use sampler = "uniform"')
    middle = len(hops) // 2
    return [(0.5, hops[0], hops[middle - 1]), (1.0, hops[middle], hops[-1])]


class Weighted(Sampler):
    """Base of the rules that draw by weight. `spacing`: other tasks between two draws of one; at most half the set."""

    def __init__(self, tasks: Sequence[Task], rng: random.Random, *, spacing: int = 16) -> None:
        super().__init__(tasks, rng)
        self._spacing = min(max(spacing, 0), len(self._ids) // 2)
        self._recent: list[str] = []
        self._seen: dict[str, list[float]] = {}  # task → running means, the last entry being the number of reports

    @abstractmethod
    def _weight(self, task: str, progress: float) -> float: ...

    def _next(self, progress: float) -> str:
        free = [id_ for id_ in self._ids if id_ not in self._recent]
        weights = [self._weight(id_, progress) for id_ in free]
        chosen = self._rng.choices(free, weights)[0]
        self._recent = [*self._recent, chosen][-self._spacing :] if self._spacing else []
        return chosen

    def _average(self, task: str, values: Sequence[float]) -> None:
        *means, count = self._seen.get(task, [0.0] * (len(values) + 1))
        count += 1
        self._seen[task] = [*(mean + (new - mean) / count for mean, new in zip(means, values, strict=True)), count]

    def _state(self) -> dict[str, Any]:
        return {"recent": list(self._recent), "seen": {task: list(values) for task, values in self._seen.items()}}

    def _restore(self, own: dict[str, Any]) -> None:
        self._recent = list(own["recent"])
        self._seen = {task: list(values) for task, values in own["seen"].items()}


class Failure(Weighted):
    """In proportion to 1 - success. A task's success is its running mean, drawn towards `prior` by one report's weight
    [D], so that an unexplored task counts as `prior` and a solved one keeps a chance until it is solved repeatedly."""

    def __init__(self, tasks: Sequence[Task], rng: random.Random, *, prior: float = 0.5, spacing: int = 16) -> None:
        super().__init__(tasks, rng, spacing=spacing)
        if not 0.0 <= prior < 1.0:
            raise RecipeError(f"prior is {prior}", where="tasks.sampler", hint="an expected success below 1")
        self._prior = prior

    def success(self, task: str) -> float:
        """What is thought of a task's success, in [0, 1)."""
        mean, count = self._seen.get(task, (0.0, 0))
        return (mean * count + self._prior) / (count + 1)

    def _weight(self, task: str, progress: float) -> float:
        return 1.0 - self.success(task)

    def _note(self, task: str, success: float, turns: float, thinking_tokens: float) -> None:
        self._average(task, [success])


class Harder(Weighted):
    """Harder tasks more often later: weight exp(`strength` · progress · difficulty) [D]. Difficulty is the mean of a
    task's turns and thinking tokens, each standardised over the tasks seen; an unexplored task has 0, the average."""

    def __init__(self, tasks: Sequence[Task], rng: random.Random, *, strength: float = 1.5, spacing: int = 16) -> None:
        super().__init__(tasks, rng, spacing=spacing)
        self._strength = strength

    def difficulty(self) -> dict[str, float]:
        """The difficulty of each task seen, in standard deviations, within ±3."""
        if not self._seen:
            return {}
        columns = list(zip(*(values[:-1] for values in self._seen.values()), strict=True))
        scales = [(fmean(column), pstdev(column)) for column in columns]
        return {
            task: max(-3.0, min(3.0, fmean((v - mean) / std if std > 0 else 0.0 for v, (mean, std) in pairs)))
            for task, values in self._seen.items()
            for pairs in [list(zip(values[:-1], scales, strict=True))]
        }

    def _next(self, progress: float) -> str:
        self._difficulty = self.difficulty()
        return super()._next(progress)

    def _weight(self, task: str, progress: float) -> float:
        return math.exp(self._strength * progress * self._difficulty.get(task, 0.0))

    def _note(self, task: str, success: float, turns: float, thinking_tokens: float) -> None:
        self._average(task, [turns, thinking_tokens])


SAMPLERS: dict[str, Callable[..., Sampler]] = {"uniform": Uniform, "failure": Failure, "hops": Hops, "harder": Harder}
"""The rules that a recipe can name."""


def make_sampler(name: str, tasks: Sequence[Task], rng: random.Random, **params: Any) -> Sampler:
    """The sampler that a recipe names; RecipeError, naming the nearest, when there is none of that name."""
    if name not in SAMPLERS:
        close = nearest(name, SAMPLERS)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(SAMPLERS)}"
        raise RecipeError(f"unknown sampler {name!r}", where="tasks.sampler", hint=hint)
    return SAMPLERS[name](tasks, rng, **params)


def thin_negatives(rewards: Sequence[float | None], keep: float, rng: random.Random) -> list[int]:
    """Which members of a scored group to train: of those below the group's mean only a share `keep` [P, K2.5].

    Returns ascending indices; members without a reward are left out. Compute the credit over the *whole* group and then
    drop the others, so that thinning does not move the baseline. One number is drawn for each negative.
    """
    if not 0.0 <= keep <= 1.0:
        raise RecipeError(f"thin_negatives is {keep}", where="tasks.thin_negatives", hint="a share in [0, 1]")
    known = [reward for reward in rewards if reward is not None]
    mean = fmean(known) if known else 0.0
    return [i for i, reward in enumerate(rewards) if reward is not None and (reward >= mean or rng.random() < keep)]
