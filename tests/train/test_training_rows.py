"""Training rows of a run, read back with pyarrow: what each update's loss was taken over can be counted from them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from starting import metrics_of, start

from inspan.cli.export import Export, export
from inspan.config import load

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


@pytest.mark.parametrize("settings", [[], ["train.abandoned=false", "tasks.thin_negatives=0.5"]])
def test_the_rows_of_an_update_hold_the_tokens_of_its_loss(project: Path, tmp_path: Path, settings: list[str]) -> None:
    out = tmp_path / "out"
    start(load(project / "recipe.toml", ["train.updates=3", "eval.tasks=1", *settings]), out)
    export(out, Export("parquet", "training"))
    table = pq.read_table(out / "training.parquet")
    assert set(table["fingerprint"].to_pylist()) and None not in table["reward"].to_pylist()
    assert sum(row["trained_tokens"] for row in metrics_of(out)) > 0
    for row in metrics_of(out):
        weights = table.filter(pc.equal(table["update"], row["update"]))["weights"].drop_null().to_pylist()
        assert sum(weight > 0 for one in weights for weight in one) == row["trained_tokens"]
    for row in table.to_pylist():
        lists = [row[name] for name in ("tokens", "mask", "logprobs", "versions", "turns")]
        assert len({len(one) for one in lists}) == 1
        if row["weights"] is not None:
            assert [bool(weight) for weight in row["weights"]] == row["mask"]
            assert all(a == 0.0 for a, on in zip(row["advantages"], row["mask"], strict=True) if not on)


def test_the_example_of_the_documents_runs(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    start(load(project / "recipe.toml", ["train.updates=2", "eval.tasks=1"]), Path("mine"))
    export(Path("mine"), Export("parquet", "training"))
    importlib.import_module("pyarrow")
    exec(compile(code, PAGE.name, "exec"), {"__name__": "example"})
