"""Held-out evaluation: arms side by side on the same tasks. Contract: a task's seed is the same for every arm."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from inspan.config import Arm, Recipe
from inspan.engine.base import WeightsRef
from inspan.errors import InputError, ParityError, RecipeError
from inspan.gateway.base import Role
from inspan.learner.checkpoint import latest
from inspan.learner.store import read_weights
from inspan.parity.fingerprint import read
from inspan.parity.watch import Drift, Guard, Watch
from inspan.progress import Progress
from inspan.rewards.metrics import summarise
from inspan.rollout.dispatcher import next_life, run_tasks
from inspan.rollout.executor import LocalExecutor
from inspan.stopping import run_until_stopped
from inspan.tasks.base import Task
from inspan.trace.records import Rollout
from inspan.train.environment import HELD_OUT, make_environment
from inspan.train.setup import FROZEN, POLICY, Stack, build_stack, roles_at

ARM_KEYS = (
    "n", "item_f1", "exact", "f1", "output_recall", "precision", "trajectory_recall", "answer_found", "prune_accuracy",
    "pruned", "ndcg", "mrr", "tool_calls_per_turn", "turns", "critical_steps", "parallel_width", "tool_calls",
    "spawn_rate", "invalid_calls", "critical_path_s", "recovery", "failed",
)  # fmt: skip


async def run_arm(
    stack: Stack, name: str, arm: Arm, tasks: Sequence[Task], watch: Watch | None = None
) -> list[Rollout]:
    """All rollouts of an arm: each task `eval.seeds` times, `rollout.concurrency` at once. Those in the recipe's own
    harness are shown to `watch`."""
    recipe = stack.recipe
    await stack.ensure(arm.policy)
    spec = arm.harness or recipe.harness
    runner = stack.runner(
        spec,
        _arm_roles(recipe, spec, arm.policy),
        temperature=recipe.eval.temperature,
        watch=watch if spec == recipe.harness else None,
    )
    home = LocalExecutor(runner)
    try:
        groups = await run_tasks(
            home,
            tasks,
            samples=recipe.eval.seeds,
            seed=recipe.seed,
            concurrency=recipe.rollout.concurrency,
            prefix=f"eval-{name}-",
            store=stack.store,
            life=next_life(stack.store) if stack.store else 0,
        )
    finally:
        await home.close()
    return [rollout for group in groups for rollout in group.rollouts]


async def held_out_figures(stack: Stack, name: str) -> dict[str, float]:
    """The policy as it is now on the held-out tasks: a row of figures. `name` tells these rollouts from others."""
    tasks = stack.environment.held_out[HELD_OUT][: stack.recipe.eval.tasks]
    return table_row(await run_arm(stack, name, Arm(), tasks), stack.recipe.limits.width)


def _arm_roles(recipe: Recipe, spec: str, policy: str) -> list[Role]:
    """The roles of an arm: what the recipe trains runs on the arm's policy, what is frozen stays as at the end."""
    if spec in ("single", "search"):
        return [Role("main", policy, False)]
    roles = roles_at(recipe.agents, 1.0)
    return [replace(role, policy=policy if role.trainable else role.policy, trainable=False) for role in roles]


async def evaluate_arms(
    stack: Stack, arms: dict[str, Arm], progress: Progress, watch: Watch | None = None
) -> tuple[dict[str, Any], dict[str, list[Rollout]]]:
    """The tables of a summary (`arms`, `by_kind`, `by_split`), and the rollouts of each arm on the held-out split."""
    recipe = stack.recipe
    tables: dict[str, Any] = {"arms": {}, "by_kind": {}, "by_split": {}}
    kept: dict[str, list[Rollout]] = {}
    for split, tasks in _chosen(stack).items():
        for name, arm in arms.items():
            progress.phase(f"evaluating {name.replace('_', ' ')} on {split.replace('_', ' ')}")
            rollouts = await run_arm(stack, f"{name}-{split}", arm, tasks[: recipe.eval.tasks], watch)
            row = table_row(rollouts, recipe.limits.width)
            if split != HELD_OUT:
                tables["by_split"].setdefault(split, {})[name] = row
                continue
            tables["arms"][name], kept[name] = row, rollouts
            for kind in sorted({r.task.kind for r in rollouts}):
                of_kind = [r for r in rollouts if r.task.kind == kind]
                tables["by_kind"].setdefault(kind, {})[name] = table_row(of_kind, recipe.limits.width)
    return tables, kept


def _chosen(stack: Stack) -> Mapping[str, Sequence[Task]]:
    """The held-out splits that the recipe asks for. Raises RecipeError for one that is not there."""
    there, wanted = stack.environment.held_out, stack.recipe.eval.splits
    if unknown := [name for name in wanted if name not in there]:
        raise RecipeError(f"no held-out split {unknown[0]!r}", where="eval.splits", hint=f"known: {', '.join(there)}")
    return {name: tasks for name, tasks in there.items() if not wanted or name in wanted}


def table_row(rollouts: Sequence[Rollout], width: int | None) -> dict[str, float]:
    """One arm of a table."""
    row = summarise(rollouts, width=width)
    return {key: row[key] for key in ARM_KEYS if key in row}


def per_task(rollouts: Sequence[Rollout], width: int | None) -> list[dict[str, Any]]:
    """The figures of every rollout of an arm, for paired comparisons."""
    rows = []
    for rollout in rollouts:
        row = table_row([rollout], width)
        rows.append({"task": rollout.task.id, "kind": rollout.task.kind, "member": rollout.member, **row})
    return rows


def evaluate(
    recipe: Recipe, *, run: Path | None, progress: Progress, verify: bool = False, allow_drift: bool = False
) -> dict[str, Any]:
    """Evaluate the arms of a recipe; with `run`, on the weights of its newest checkpoint. Returns a summary.

    What the run's training did not show the model raises `ParityError`; with `allow_drift` the summary tells it.

    With `verify` every invariant that can be checked is checked on the way: a breach raises `InvariantBroken`.
    """
    return run_until_stopped(_evaluate(recipe, run, progress, verify, allow_drift))


async def load_final(stack: Stack, run: Path) -> None:
    """Serve the newest weights of a run as the policy. Raises InputError when there are none."""
    version, tensors = read_weights(final_weights(run))
    await stack.engine.load(POLICY, WeightsRef(version, tensors=dict(tensors)))


async def _evaluate(
    recipe: Recipe, run: Path | None, progress: Progress, verify: bool, allow_drift: bool
) -> dict[str, Any]:
    stack = build_stack(recipe, make_environment(recipe), None, verify=verify)
    try:
        watch = None
        if run is not None:
            await load_final(stack, run)
            watch = watch_over(run, stack.setting(recipe.harness), allow_drift=allow_drift)
        arms = dict(recipe.eval.arms)
        if run is None:
            arms = {name: arm for name, arm in arms.items() if arm.policy != POLICY or arm.harness} or {
                "warm_start": Arm(policy=FROZEN)
            }
        tables, _ = await evaluate_arms(stack, arms, progress, watch)
        summary = {"recipe": recipe.name, "seed": recipe.seed, **tables}
        if watch is not None:
            summary["fingerprint"] = watch.id
        if isinstance(watch, Drift):
            summary["drift"] = watch.differences
        if stack.verifier:
            stack.verifier.demand()
            summary["verified"] = stack.verifier.report()
        return summary
    finally:
        await stack.close()


def watch_over(run: Path, setting: Mapping[str, Any], *, allow_drift: bool) -> Guard | Drift:
    """What holds a setting to the fingerprint of a run, or tells how it differs. Raises `ParityError`."""
    try:
        trained = read(run)
    except ParityError:
        if not allow_drift:
            raise
        trained = None
    return Guard(trained, setting) if trained is not None and not allow_drift else Drift(trained, setting)


def final_weights(run: Path) -> Path:
    """The newest published weights of a run. Raises InputError when there are none."""
    found = sorted((run / "weights").glob("v*"))
    if not found:
        state = "it was stopped: resume it first" if latest(run / "checkpoints") else "it has not been trained"
        raise InputError("the run has no weights", where=str(run), hint=state)
    return found[-1]


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    partial.replace(path)
