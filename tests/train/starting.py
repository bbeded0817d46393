"""Starting a run whose progress nobody sees, and looking at what it left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from inspan.config import Recipe
from inspan.train import run
from inspan.train.evaluate import final_weights


class Silent:
    """Progress that nobody sees; `stop_at` raises as Ctrl-C would when that update is reported."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.phases: list[str] = []

    def start(self, recipe: Any, total: int, done: int = 0) -> None:
        self.done = done

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def update(self, metrics: Mapping[str, Any]) -> None:
        if metrics["update"] == self.stop_at:
            raise KeyboardInterrupt

    def finish(self, summary: Any = None) -> None:
        self.summary = summary


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    return load_file(final_weights(out) / "model.safetensors")


def start(recipe: Recipe, out: Path, *, resume: bool = False, stop_at: int | None = None) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return run(recipe, out=out, resume=resume, progress=Silent(stop_at))
