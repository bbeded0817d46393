"""Faults of rewards and of the run directory: told, not trained over, and mended where they can be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from starting import metrics_of, start

from inspan.config import Recipe, load
from inspan.errors import CheckpointError, InputError


@pytest.mark.parametrize(
    ("name", "body"),
    [("raising", "raise ValueError"), ("nan", "return float('nan')"), ("none", "return None"), ("text", "return 'x'")],
)
def test_a_term_that_scores_nothing_stops_the_run(project: Path, tmp_path: Path, name: str, body: str) -> None:
    (project / f"{name}.py").write_text(f"def term(rollout):\n    {body}\n")
    recipe = load(project / "recipe.toml", [f'rewards.0.use="{name}:term"'])
    with pytest.raises(InputError, match="none of 8 rollouts got a reward") as caught:
        start(recipe, tmp_path / "out")
    assert caught.value.where == f"{name}:term"


def test_a_term_of_enormous_numbers_does_not_break_the_sums(project: Path, tmp_path: Path) -> None:
    (project / "enormous.py").write_text(
        "def term(rollout):\n    return 1e308 if rollout.member == 0 else -len(rollout.answer)\n"
    )
    recipe = load(project / "recipe.toml", ['rewards.0.use="enormous:term"', "train.updates=1"])
    start(recipe, tmp_path / "out")
    (row,) = metrics_of(tmp_path / "out")
    assert row["scored"] == 6


def test_damage_in_a_finished_run_is_mended_or_told_on_resume(recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(recipe, out)
    published = out / "weights" / "v000004" / "model.safetensors"
    whole, lines = load_file(published), (out / "metrics.jsonl").read_bytes()
    published.write_bytes(published.read_bytes()[:100])
    (out / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + lines)
    start(recipe, out, resume=True)
    assert load_file(published).keys() == whole.keys()
    assert (out / "metrics.jsonl").read_bytes() == lines
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(CheckpointError, match="no complete checkpoint is left"):
        start(recipe, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == lines
