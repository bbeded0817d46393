"""The arms of the README's table over three seeds: `make study` (hours), or parts of it with options.

Each arm of each seed is an ordinary `inspan train` into runs/study/<arm>-<seed>; what is there already is not run
again. Prints one JSON object a row: arms (means over seeds), paired differences with 95 % intervals, and the critical
steps of the single agent over budgets against the swarm's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.runs import ROOT, Run, train_all

from inspan.bench.curve import first_reached
from inspan.bench.paired import paired_difference
from inspan.config import load
from inspan.train.environment import HELD_OUT, make_environment

RECIPES = {
    "swarm": "recipes/swarm.toml",
    "single": "recipes/single.toml",
    "lambda-zero": "recipes/study/lambda-zero.toml",
    "lambda-constant": "recipes/study/lambda-constant.toml",
    "joint": "recipes/study/joint.toml",
}
WIDE_ONLY = ("tasks.held_out_kinds={ wide = 1 }", "tasks.held_out=32", "eval.tasks=32", 'eval.splits=["held_out"]')
BUDGETS = {"swarm": [6, 8, 10, 14], "single": [6, 10, 14, 20, 30, 44]}
FIGURES = ("item_f1", "exact", "critical_steps", "parallel_width", "tool_calls", "spawn_rate", "critical_path_s")


def scores(outs: dict[int, Path], arm: str, kind: str | None, figure: str) -> dict[tuple[str, int], float]:
    """(task, seed · 1000 + member) → figure, of an arm's held-out rollouts."""
    found: dict[tuple[str, int], float] = {}
    for seed, out in outs.items():
        for row in json.loads((out / "eval.json").read_text())[arm]:
            if kind is None or row["kind"] == kind:
                found[row["task"], seed * 1000 + row["member"]] = row.get(figure, 0.0)
    return found


def sweep(outs: dict[str, dict[int, Path]], jobs: int) -> None:
    """Item F1 and critical steps on wide tasks (8 to 10 entities) under each budget of critical steps, and the ratio of
    single agent to swarm at the F1 that both reach."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for arm, found in outs.items():
        asked = [(out, budget) for budget in BUDGETS[arm] for out in found.values()]
        with ThreadPoolExecutor(jobs) as pool:
            rows = dict(zip(asked, pool.map(_evaluated, asked), strict=True))
        for budget in BUDGETS[arm]:
            some = [rows[out, budget] for out in found.values()]
            means = {figure: round(fmean(row[figure] for row in some), 4) for figure in ("item_f1", "critical_steps")}
            curves.setdefault(arm, []).append((means["critical_steps"], means["item_f1"]))
            say(what="budget", arm=arm, budget=budget, seeds=len(some), **means)
    if len(curves) > 1:
        reached = min(max(f1 for _, f1 in curve) for curve in curves.values())
        steps = {arm: round(first_reached(curve, reached), 2) for arm, curve in curves.items()}
        ratio = round(steps["single"] / steps["swarm"], 2)
        say(what="critical steps at equal item F1", item_f1=reached, ratio=ratio, bound=round(bound(), 2), **steps)


def bound() -> float:
    """What perfect play would save: a search and a read for each fact and an answer, against two calls of an
    orchestrator and one sub-agent for each entity."""
    tasks = make_environment(load(ROOT / RECIPES["swarm"], WIDE_ONLY)).held_out[HELD_OUT]
    facts = [len(task.meta["attributes"]) for task in tasks]
    alone = [2 * len(task.meta["names"]) * n + 1 for task, n in zip(tasks, facts, strict=True)]
    return fmean(alone) / fmean(2 * n + 1 + 2 for n in facts)


def _evaluated(asked: tuple[Path, int]) -> dict[str, float]:
    """The figures of a finished run on wide tasks under another budget of critical steps."""
    out, budget = asked
    settings = [f"limits.critical_steps={budget}", 'eval.arms={ trained = { policy = "policy" } }', *WIDE_ONLY]
    extra = [part for text in settings for part in ("--set", text)]
    command = [sys.executable, "-m", "inspan", "eval", str(out), *extra, "--json", "--allow-drift"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["by_kind"]["wide"]["trained"]


def _run(arm: str, seed: int, options: argparse.Namespace) -> Run:
    return Run(RECIPES[arm], options.out / f"{arm}-{seed}", seed, tuple(options.settings))


def say(**row: Any) -> None:
    """One row of output."""
    print(json.dumps(row), flush=True)


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the study and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    parser.add_argument("--sweep", action=argparse.BooleanOptionalAction, default=True, help="of budgets, at the end")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="passed to every training")
    options = parser.parse_args(arguments)
    made = {(arm, seed): _run(arm, seed, options) for seed in options.seeds for arm in options.arms}
    found = train_all(made, options.jobs)
    outs = {arm: {seed: found[arm, seed] for seed in options.seeds} for arm in options.arms}
    columns = {arm: (found, "trained") for arm, found in outs.items()}
    if "swarm" in outs:
        columns["warm start"] = (outs["swarm"], "warm_start")
    for name, (found, arm) in columns.items():
        for kind in ("wide", "narrow", None):
            means = {f: round(fmean(scores(found, arm, kind, f).values()), 4) for f in FIGURES}
            say(what="arm", arm=name, kind=kind or "all", seeds=len(found), **means)
    for other in [name for name in columns if name != "swarm" and "swarm" in columns]:
        for kind in ("wide", None):
            delta = paired_difference(
                scores(*columns["swarm"], kind, "item_f1"), scores(*columns[other], kind, "item_f1")
            )
            row = {"mean": round(delta.mean, 4), "low": round(delta.low, 4), "high": round(delta.high, 4)}
            say(what="swarm item F1 minus", arm=other, kind=kind or "all", tasks=delta.n, **row)
    if options.sweep:
        sweep({arm: found for arm, found in outs.items() if arm in BUDGETS}, options.jobs)


if __name__ == "__main__":
    main()
