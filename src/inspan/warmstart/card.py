"""The model card of a base model. Contract: figures are those that were measured when it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inspan.warmstart.recipe import WarmstartRecipe


@dataclass(frozen=True, slots=True)
class About:
    """The words of a card that differ between agents: what the model can do, its data, its habits."""

    knows: str
    data: str
    habits: str


def about_library(recipe: WarmstartRecipe, spawn: Mapping[str, float]) -> About:
    """Of a base for the agents of a library; `spawn`: measured rates of delegation by kind of question."""
    last = recipe.phases[-1]
    wasted = f"; {last.habits.needless:.0%} of those hand some of the work out again" if last.habits.needless else ""
    rates = ", ".join(f"{kind} {rate:.0%}" for kind, rate in spawn.items())
    return About(
        "it searches, reads, copies names that it never saw, and can\ndelegate. It knows nothing but the library tools "
        "of `inspan.harness` and is of no use outside of them.",
        "Demonstrations of a scripted expert in the real environment",
        f"Premature answers in {last.habits.premature:.0%} of the episodes, a look-up missed with\nprobability "
        f"{last.habits.miss:.0%}; sub-agents premature in {last.subagent_habits.premature:.0%}. Orchestrator\n"
        f"demonstrations that delegate: {rates}{wasted}.",
    )


def about_search(recipe: WarmstartRecipe) -> About:
    """Of a base for the search agent."""
    habits = recipe.phases[-1].search_habits
    limit = recipe.search.limit or recipe.shape.positions
    return About(
        "it searches a corpus hop by hop, prunes\nchunks, and lists those that support the answer. It knows nothing "
        f"but the four tools of `inspan.harness.search`,\nunder a budget of {limit} tokens, and is of no other use.",
        f"It goes on from `{recipe.start}`. Demonstrations of a scripted searcher in the real harness",
        f"It quits after some of the facts in {habits.quit:.0%} of the episodes of several hops, prunes one at a time\n"
        f"in {habits.single:.0%}; goes on without pruning with probability {habits.forget:.0%}, prunes a chunk that is "
        f"needed with {habits.wrong:.0%}, leaves\none that is not with {habits.partial:.0%}, and lists one that holds "
        f"no fact with {habits.sloppy:.0%}.",
    )


def write_card(
    folder: Path,
    recipe: WarmstartRecipe,
    about: About,
    held_out: Mapping[str, Mapping[str, float]],
    shape: str,
    command: str,
) -> None:
    """Write `README.md` beside the weights. `shape` says how large they are, `command` is what made them."""
    phases = "\n".join(f"| {p.name} | {p.kind} | {p.steps} | {p.lr:g} → {p.lr * p.floor:g} |" for p in recipe.phases)
    accuracy = "\n".join(f"| {name} | {row['token']:.3f} | {row['trajectory']:.3f} |" for name, row in held_out.items())
    text = f"""# {recipe.name}

A Llama of {shape} that
stands for the strong base model of the published recipes: {about.knows}

Made by `{command}` (seed {recipe.seed}); the data and their order follow from recipe and seed.

**Data.** {about.data}, {1 - recipe.real_share:.0%} of them in
{recipe.worlds} made-up worlds (names glued from place names, values at random) and the rest over the countries and
cities of the training split. No held-out entity is drawn for it, and no attribute word or layout of the unseen split.

**Habits of the last phase.** {about.habits} Reinforcement learning is to mend this.

| phase | rows | steps | learning rate |
|---|---|---|---|
{phases}

Teacher-forced accuracy on clean demonstrations over held-out entities (the faulty habits cost some of it on purpose):

| rows | a token | a whole trajectory |
|---|---|---|
{accuracy}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
