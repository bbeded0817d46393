"""What a base model is made of: a TOML file as validated data. Contract: unknown keys are errors."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inspan.config.load import parse_override
from inspan.config.search import Search
from inspan.errors import RecipeError

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0)]
Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Shape(_Section):
    """The model: a Llama with tied embeddings."""

    vocabulary: Annotated[int, Field(ge=400)] = 768
    width: Positive = 128
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    hidden: Positive = 384
    positions: Annotated[int, Field(ge=512)] = 4096

    @model_validator(mode="after")
    def _divides(self) -> Shape:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} does not give {self.heads} heads an even number of dimensions each")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")
        return self


class HabitShares(_Section):
    """The expert's habits in a phase; see `inspan.warmstart.demos.Habits`."""

    premature: Rate = 0.0
    miss: Rate = 0.0
    spawn: Rate = 0.0
    partial: Rate = 0.3
    serial: Rate = 0.2
    needless: Rate = 0.0
    fault: Rate = 0.03
    budget: Rate = 0.2


class SearchHabitShares(_Section):
    """The searcher's habits in a phase; see `inspan.warmstart.searcher.SearchHabits`."""

    quit: Rate = 0.0
    forget: Rate = 0.0
    wrong: Rate = 0.0
    partial: Rate = 0.0
    sloppy: Rate = 0.0
    single: Rate = 0.0
    apart: Rate = 0.25
    read: Rate = 0.2
    grep: Rate = 0.05
    fault: Rate = 0.02


class PhaseSection(_Section):
    """One phase. `copy`: repeated random tokens; `demos`: demonstrations, with a share of copy rows mixed in."""

    name: str
    kind: Literal["copy", "demos"]
    steps: Positive
    lr: Annotated[float, Field(gt=0)]
    warmup: Annotated[int, Field(ge=0)] = 0
    floor: Rate = 1.0  # learning rate at the end of the phase, as a share of `lr` (linear)
    small_alphabet: Rate = 0.0  # share of copy rows over few distinct tokens, so that repeats are ambiguous
    copy_share: Rate = 0.0  # share of copy rows among demonstrations
    kinds: dict[Literal["wide", "deep", "mixed", "long", "narrow", "hops_1", "hops_2", "hops_3"], Share] = {}
    roles: dict[Literal["subagent", "single", "orchestrator"], Share] = {}
    wide: tuple[Positive, Positive] = (2, 10)
    mixed: tuple[Positive, Positive] = (2, 4)
    habits: HabitShares = HabitShares()
    subagent_habits: HabitShares = HabitShares()
    search_habits: SearchHabitShares = SearchHabitShares()

    @model_validator(mode="after")
    def _not_empty(self) -> PhaseSection:
        for name, (low, high) in (("wide", self.wide), ("mixed", self.mixed)):
            if low > high:
                raise ValueError(f"`{name}` = [{low}, {high}] is empty; put the smaller first")
        return self


class WarmstartRecipe(_Section):
    """A base model: its shape and the phases that make it.

    `agent` says what is demonstrated: the agents of a library (swarm, single) or the search agent, which is told
    `system` and keeps to the budget `search`. `start` names a shipped model, or a folder, to go on from: its tokenizer
    is taken over (with tokens of the agent's own added), and `shape` does not apply.
    """

    name: str = "tiny"
    agent: Literal["library", "search"] = "library"
    start: str = ""
    system: str = "You search a library."
    search: Search = Search()
    seed: int = 0
    threads: Positive = 1
    batch_tokens: Positive = 2048
    worlds: Positive = 400
    real_share: Rate = 0.25
    reading_weight: Rate = 0.0  # of the loss on what the assistant reads
    checkpoint_every: Positive = 500
    shape: Shape = Shape()
    phases: list[PhaseSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _shows_something(self) -> WarmstartRecipe:
        for phase in self.phases:
            wanted = {"kinds": phase.kinds} if self.agent == "search" else {"kinds": phase.kinds, "roles": phase.roles}
            for name, shares in wanted.items():
                if phase.kind == "demos" and not any(shares.values()):
                    raise ValueError(f"phase {phase.name!r}, of demos, needs `{name}` with a positive share")
            wrong = [kind for kind in phase.kinds if kind.startswith("hops_") != (self.agent == "search")]
            if wrong:
                raise ValueError(f"phase {phase.name!r}: agent {self.agent!r} has no tasks of kind {wrong[0]!r}")
        return self


def load(path: str | Path, overrides: Sequence[str] = ()) -> WarmstartRecipe:
    """Read a warm-start recipe. Raises RecipeError naming the file and the key."""
    try:
        data: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}", where=str(path), hint="recipes/base/tiny.toml") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"not TOML: {error}", where=str(path)) from None
    for text in overrides:
        _assign(data, text)
    try:
        return WarmstartRecipe.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RecipeError(f"{key}: {first['msg']}", where=str(path), hint="see recipes/base/tiny.toml") from None


def _assign(data: dict[str, Any], text: str) -> None:
    keys, value = parse_override(text)
    node: Any = data
    try:
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value
    except (KeyError, IndexError, TypeError):
        raise RecipeError(
            "names no place in the recipe", where=f"--set {text}", hint="e.g. --set phases.2.steps=100"
        ) from None
