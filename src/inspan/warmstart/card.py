"""The model card of a base model. Contract: figures are those that were measured when it was made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inspan.warmstart.recipe import WarmstartRecipe


def write_card(
    folder: Path,
    recipe: WarmstartRecipe,
    held_out: Mapping[str, Mapping[str, float]],
    spawn: Mapping[str, float],
    parameters: int,
    command: str,
) -> None:
    """Write `README.md` beside the weights. `command` is what made them."""
    shape = recipe.shape
    last = recipe.phases[-1]
    phases = "\n".join(f"| {p.name} | {p.kind} | {p.steps} | {p.lr:g} → {p.lr * p.floor:g} |" for p in recipe.phases)
    accuracy = "\n".join(f"| {name} | {row['token']:.3f} | {row['trajectory']:.3f} |" for name, row in held_out.items())
    wasted = f"; {last.habits.needless:.0%} of those hand some of the work out again" if last.habits.needless else ""
    rates = ", ".join(f"{kind} {rate:.0%}" for kind, rate in spawn.items())
    text = f"""# {recipe.name}

A Llama of {parameters:,} parameters ({shape.layers} layers, width {shape.width}, vocabulary {shape.vocabulary}) that
stands for the strong base model of the published recipes: it searches, reads, copies names that it never saw, and can
delegate. It knows nothing but the library tools of `inspan.harness` and is of no use outside of them.

Made by `{command}` (seed {recipe.seed}); the data and their order follow from recipe and seed.

**Data.** Demonstrations of a scripted expert in the real environment, {1 - recipe.real_share:.0%} of them in
{recipe.worlds} made-up worlds (names glued from place names, values at random) and the rest over the countries and
cities of the training split. No held-out entity is drawn for it, and no attribute word or layout of the unseen split.

**Habits of the last phase.** Premature answers in {last.habits.premature:.0%} of the episodes, a look-up missed with
probability {last.habits.miss:.0%}; sub-agents premature in {last.subagent_habits.premature:.0%}. Orchestrator
demonstrations that delegate: {rates}{wasted}. Reinforcement learning is to mend this.

| phase | rows | steps | learning rate |
|---|---|---|---|
{phases}

Teacher-forced accuracy on clean demonstrations over held-out entities (the faulty habits cost some of it on purpose):

| rows | a token | a whole trajectory |
|---|---|---|
{accuracy}
"""
    (folder / "README.md").write_text(text, encoding="utf-8")
