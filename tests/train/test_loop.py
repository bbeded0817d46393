"""The loop: from a recipe to a run directory, stopped and resumed at any point without loss."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from starting import Silent, metrics_of, start, weights_of

from inspan.config import Recipe, load
from inspan.errors import InputError, RecipeError
from inspan.learner.checkpoint import latest
from inspan.trace.store import TraceStore
from inspan.train import evaluate
from inspan.train.environment import make_environment


def test_a_run_leaves_what_a_user_reads(recipe: Recipe, tmp_path: Path) -> None:
    summary = start(recipe, tmp_path / "out")
    rows = metrics_of(tmp_path / "out")
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert all(row["rollouts"] == row["scored"] == 8 and row["entropy"] > 0 for row in rows)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["updates"] == 4 and set(summary["arms"]) == {"warm_start", "trained"}
    assert {"n", "item_f1", "exact", "critical_steps", "tool_calls", "spawn_rate", "invalid_calls"} <= set(
        summary["arms"]["trained"]
    )
    shown = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert {row["arm"] for row in shown} == {"training", "warm_start", "trained"}
    assert shown[0]["sessions"][0]["messages"][1]["content"].startswith("say ")


def test_every_scored_rollout_is_trained_once(recipe: Recipe, tmp_path: Path) -> None:
    start(recipe, tmp_path / "out")
    store = TraceStore(tmp_path / "out" / "trace.sqlite", create=False)
    ledger = store.rollouts()
    store.close()
    assert all(row.terminal for row in ledger)
    assert sorted(row.trained for row in ledger if row.trained is not None) == [u for u in range(4) for _ in range(8)]


def test_the_weights_move_and_the_frozen_policy_does_not(recipe: Recipe, tmp_path: Path, model: Path) -> None:
    start(recipe, tmp_path / "out")
    before, after = load_file(model / "model.safetensors"), weights_of(tmp_path / "out")
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved and set(before) == set(after)


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(project: Path, tmp_path: Path) -> None:
    recipe = load(project / "recipe.toml", ["deterministic=true"])
    start(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        start(recipe, tmp_path / "cut", stop_at=1)
    start(recipe, tmp_path / "cut", resume=True)
    whole, cut = weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    timed = ("seconds", "rollout_s", "learn_s", "tokens_per_s", "rollout_tokens_per_s")
    strip = [{k: v for k, v in row.items() if k not in timed} for row in metrics_of(tmp_path / "whole")]
    assert strip == [{k: v for k, v in row.items() if k not in timed} for row in metrics_of(tmp_path / "cut")]


def test_a_stopped_run_has_saved_the_update_it_reported_last(recipe: Recipe, tmp_path: Path) -> None:
    sparse = recipe.model_copy(update={"train": recipe.train.model_copy(update={"checkpoint_every": 50})})
    with pytest.raises(KeyboardInterrupt):
        start(sparse, tmp_path / "out", stop_at=2)
    found = latest(tmp_path / "out" / "checkpoints")
    assert found is not None and found.name.endswith("step-3")
    assert [row["update"] for row in metrics_of(tmp_path / "out")] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_at_random_points_nothing_reported_is_lost_or_trained_twice(
    project: Path, tmp_path: Path, mode: str
) -> None:
    out, rng = tmp_path / "out", random.Random(mode)
    command = [
        sys.executable, "-m", "inspan", "train", str(project / "recipe.toml"), "--out", str(out), "--set",
        "train.updates=6", "--set", f'rollout.mode="{mode}"', "--set", "eval.tasks=1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for attempt in range(4):
        resume = ["--resume"] if (out / "recipe.toml").exists() else []
        process = subprocess.Popen(
            [*command, *resume], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        wanted = min(5, attempt + 1)
        if attempt < 3:
            _wait_for_line(process, out / "metrics.jsonl", wanted)
            time.sleep(rng.random() * 0.05)  # the point of the kill, not a synchronisation
            process.send_signal(signal.SIGKILL)
            process.communicate()
        else:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error.decode()
    assert [row["update"] for row in metrics_of(out)] == list(range(6))
    store = TraceStore(out / "trace.sqlite", create=False)
    trained = [row.trained for row in store.rollouts() if row.trained is not None]
    store.close()
    assert sorted(trained) == [u for u in range(6) for _ in range(8)]


def _wait_for_line(process: subprocess.Popen[bytes], path: Path, lines: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        time.sleep(0.02)


def test_async_mode_overlaps_and_stays_within_its_staleness(project: Path, tmp_path: Path) -> None:
    recipe = load(project / "recipe.toml", ['rollout.mode="async"', "rollout.max_staleness=1"])
    start(recipe, tmp_path / "out")
    rows = metrics_of(tmp_path / "out")
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert max(row["staleness_max"] for row in rows) <= 1


def test_a_finished_run_can_be_evaluated_again(recipe: Recipe, tmp_path: Path) -> None:
    summary = start(recipe, tmp_path / "out")
    again = evaluate(recipe, run=tmp_path / "out", progress=Silent())
    assert again["arms"] == summary["arms"]
    with pytest.raises(InputError, match="has no weights"):
        evaluate(recipe, run=tmp_path, progress=Silent())


def test_held_out_tasks_are_evaluated_along_the_way(project: Path, tmp_path: Path) -> None:
    start(load(project / "recipe.toml", ["eval.every=2", "eval.tasks=1"]), tmp_path / "out")
    rows = metrics_of(tmp_path / "out")
    assert [row["held_out"]["n"] if "held_out" in row else None for row in rows] == [None, 1, None, None]


def test_a_held_out_split_that_is_not_there_is_named(project: Path) -> None:
    with pytest.raises(RecipeError, match="no held-out split 'unseen_layuot'"):
        evaluate(
            load(
                project / "recipe.toml", ['eval.splits=["unseen_layuot"]', 'eval.arms={ a = { policy = "policy@v0" } }']
            ),
            run=None,
            progress=Silent(),
        )


def test_own_tasks_are_held_out_by_mark_or_by_the_last_fifth(project: Path) -> None:
    environment = make_environment(load(project / "recipe.toml"))
    assert [t.id for t in environment.held_out["held_out"]] == ["t7"]
    rows = [json.loads(line) for line in (project / "tasks.jsonl").read_text().splitlines()]
    rows[0]["split"] = rows[3]["split"] = "held_out"
    (project / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = make_environment(load(project / "recipe.toml"))
    assert [t.id for t in environment.held_out["held_out"]] == ["t0", "t3"]
    assert not {t.id for t in environment.train} & {"t0", "t3"}
