"""Trainings as processes of their own, some at a time; finished ones are not run again, stopped ones are resumed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Run:
    """A training: its recipe (relative to the repository), settings, seed, and the folder it writes."""

    recipe: str
    out: Path
    seed: int = 0
    settings: tuple[str, ...] = ()

    def train(self) -> Path:
        """Run it, unless it is finished; returns the run directory. Raises CalledProcessError when it fails."""
        if not (self.out / "summary.json").exists():
            resume = ["--resume"] if (self.out / "recipe.toml").exists() else []
            extra = [part for text in self.settings for part in ("--set", text)]
            command = [sys.executable, "-m", "inspan", "train", str(ROOT / self.recipe), "--seed", str(self.seed)]
            subprocess.run([*command, "--out", str(self.out), *extra, *resume], check=True, stdout=sys.stderr)
        return self.out


def train_all(runs: Mapping[Key, Run], jobs: int) -> dict[Key, Path]:
    """Train all, `jobs` at a time, in order; the run directories by key."""
    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(runs, pool.map(Run.train, runs.values()), strict=True))
