"""On one fixed batch, our losses equal those of TRL's GRPOTrainer."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.external
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed (pip install trl)")
def test_losses_equal_trl_on_one_fixed_batch(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = importlib.import_module("vs_trl").losses()
    for name in ("vs_trl", "trl_peer"):
        sys.modules.pop(name)
    assert len(rows) == 5
    for row in rows:
        assert row["ours"] == pytest.approx(row["peer"], abs=1e-5), row["what"]
        assert abs(row["peer"]) > 1e-3
