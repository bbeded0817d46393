"""Signals and faults in the middle of an update: a checkpoint holds whole updates only."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from starting import metrics_of, start, weights_of

from inspan.config import load
from inspan.errors import InspanError
from inspan.learner.learner import Learner
from inspan.stopping import Terminate


@pytest.fixture
def within(monkeypatch):
    """Call something between the sub-steps of an update."""

    def install(act, at):
        substep = Learner._substep
        seen = [0]

        def acting(self, *args):
            substep(self, *args)
            seen[0] += 1
            if seen[0] == at:
                act()

        monkeypatch.setattr(Learner, "_substep", acting)

    return install


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_signal_within_an_update_lets_it_end_and_the_run_goes_on_from_there(
    project: Path, tmp_path: Path, within, mode: str
) -> None:
    how = "deterministic=true" if mode == "sync" else 'rollout.mode="async"'
    recipe = load(project / "recipe.toml", [how, "train.epochs=3", "train.checkpoint_every=99"])
    out = tmp_path / "out"
    within(lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)], at=5)
    with pytest.raises(Terminate):
        start(recipe, out)
    rows = metrics_of(out)
    assert [row["update"] for row in rows] == [0, 1]
    start(recipe, out, resume=True)
    assert [row["update"] for row in metrics_of(out)] == [0, 1, 2, 3] and metrics_of(out)[:2] == rows
    if mode == "sync":
        start(recipe, tmp_path / "whole")
        one, other = weights_of(out), weights_of(tmp_path / "whole")
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_that_fails_half_way_is_not_saved(project: Path, tmp_path: Path, within) -> None:
    recipe = load(project / "recipe.toml", ["train.epochs=3", "deterministic=true"])

    def fail() -> None:
        raise InspanError("the loss is not finite")

    within(fail, at=5)
    with pytest.raises(InspanError):
        start(recipe, tmp_path / "out")
    start(recipe, tmp_path / "out", resume=True)
    start(recipe, tmp_path / "whole")
    one, other = weights_of(tmp_path / "out"), weights_of(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)
