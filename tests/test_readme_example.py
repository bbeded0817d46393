"""The README's own agent, reward and tasks can be trained as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import inspan
from inspan.cli import train as command
from test_docs import readme_example

SHIPPED = Path(inspan.__file__).parent / "models" / "tiny" / "config.json"


@pytest.mark.skipif(not SHIPPED.is_file(), reason="the tiny model is not in this checkout: inspan warmstart makes it")
def test_the_readmes_example_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = readme_example(tmp_path)
    small = ["train.updates=2", "train.groups=2", "train.group_size=4", "sampling.max_tokens=16"]
    command.train(recipe, small, out=tmp_path / "run", resume=False, dry_run=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(set(line["terms"]) == {"exact_match", "my_rewards:polite"} for line in lines)
    assert set(json.loads((tmp_path / "run" / "summary.json").read_text())["arms"]) == {"warm_start", "trained"}
    assert (tmp_path / "run" / "report.html").is_file() and "On held-out tasks" in capsys.readouterr().out
