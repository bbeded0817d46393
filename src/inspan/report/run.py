"""Reading a run directory. Contract: what is there is read, what is missing or cut off is noted, nothing raises for it.

A run that was killed leaves a last line cut in the middle, and a resumed run repeats updates after its checkpoint: a
broken line is skipped and noted, of repeated updates the last one holds.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspan.errors import InputError
from inspan.report.columns import numeric

RECIPE, METRICS, SUMMARY, TRAJECTORIES, REPORT = (
    "recipe.toml",
    "metrics.jsonl",
    "summary.json",
    "trajectories.jsonl",
    "report.html",
)


@dataclass(slots=True)
class Run:
    """What a run directory holds. `series` maps a metric to {update: value}; nested metrics are joined by "/"."""

    path: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def updates(self) -> int:
        """Updates that metrics were written for."""
        return len({u for values in self.series.values() for u in values})

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's."""
        return str(self.recipe.get("name") or self.summary.get("recipe") or self.path.name)


def read_run(path: str | Path) -> Run:
    """Read a run directory. Raises InputError when it is none: no folder, or none of the files of a run."""
    path = Path(path)
    if not path.is_dir():
        raise InputError("no such run directory", where=str(path), hint="give the folder that `inspan train` wrote")
    if not any((path / name).exists() for name in (RECIPE, METRICS, SUMMARY)):
        hint = f"a run holds {RECIPE}, {METRICS} and {SUMMARY}"
        raise InputError("not a run directory", where=str(path), hint=hint)
    run = Run(path)
    run.recipe = _toml(path / RECIPE, run.notes)
    run.summary = _json(path / SUMMARY, run.notes)
    for number, line in enumerate(_lines(path / METRICS, run.notes)):
        update = numeric(line.get("update"))
        for key, value in flatten(line):
            if key != "update":
                run.series.setdefault(key, {})[int(update) if update is not None else number] = value
    run.trajectories = list(_lines(path / TRAJECTORIES, run.notes))
    return run


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of nested tables, names joined by "/"."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif (number := numeric(value)) is not None:
            yield f"{prefix}{key}", number


def _toml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except tomllib.TOMLDecodeError as error:
        notes.append(f"{path.name} cannot be read: {error}")
    return {}


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: the run has not finished")
        return {}
    except (ValueError, RecursionError):
        notes.append(f"{path.name} cannot be read: it is not complete JSON")
        return {}
    return data if isinstance(data, dict) else {}


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, one at a time; broken lines are counted in one note."""
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return
    broken = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            if not text.strip():
                continue
            try:
                data = json.loads(text)
            except (ValueError, RecursionError):
                data = None
            if isinstance(data, dict):
                yield data
            else:
                broken += 1
    if broken:
        notes.append(f"{path.name}: {broken} line{'s' if broken > 1 else ''} cut off or broken, left out")
