"""Run directories: choosing one, holding it, and refusing to mix two runs. Contract: nothing of an earlier run is
overwritten unless it is resumed, and a run is resumed only under a recipe that its checkpoints fit.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inspan.config import Recipe, dump_toml, load
from inspan.errors import CheckpointError, InputError, StoreError

RECIPE = "recipe.toml"
RUNS = "runs"


def recipe_path(target: Path) -> Path:
    """The recipe that a command's argument means: a TOML file, or the one inside a run directory."""
    if not target.is_dir():
        return target
    if not (target / RECIPE).is_file():
        hint = "give a recipe (a TOML file), or the folder of a run"
        raise InputError(f"the folder holds no {RECIPE}", where=str(target), hint=hint)
    return target / RECIPE


def choose(recipe: Recipe, target: Path, out: Path | None, *, resume: bool) -> Path:
    """The run directory to use: `out`, the one that `target` is, or `runs/<name>-<n>`: the next free, or the last.

    Raises InputError when a new run would land in a used directory, or there is nothing to resume.
    """
    if out is None and target.is_dir():
        out = target
    if out is None:
        numbers = _numbers(recipe.name)
        if resume and not numbers:
            raise InputError("nothing to resume", where=f"{RUNS}/{slug(recipe.name)}-*", hint="give --out DIR")
        number = max(numbers, default=0) + (0 if resume else 1)
        return Path(RUNS) / f"{slug(recipe.name)}-{number}"
    if resume and not (out / RECIPE).is_file():
        raise InputError(
            "nothing to resume: no recipe.toml", where=str(out), hint="give the folder of a run, or drop --resume"
        )
    if not resume and out.is_dir() and any(out.iterdir()):
        hint = "add --resume to go on with it, or choose another --out"
        raise InputError("the run directory is not empty", where=str(out), hint=hint)
    return out


def slug(name: str) -> str:
    """A name as a folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _numbers(name: str) -> list[int]:
    pattern = re.compile(re.escape(slug(name)) + r"-(\d+)")
    found = (pattern.fullmatch(p.name) for p in Path(RUNS).glob("*")) if Path(RUNS).is_dir() else ()
    return [int(m[1]) for m in found if m]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a run directory, creating it; a second process that wants it gets a StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise StoreError(
            f"cannot create the run directory: {error.strerror}", where=str(folder), hint="choose --out"
        ) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            hint = "wait for it, or choose another --out"
            raise StoreError("another process is using this run directory", where=str(folder), hint=hint) from None
        yield
    finally:
        os.close(handle)


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write the resolved recipe, whole or not at all."""
    partial = folder / (RECIPE + ".part")
    partial.write_text(dump_toml(recipe), encoding="utf-8")
    os.replace(partial, folder / RECIPE)


def check_resumable(recipe: Recipe, folder: Path) -> None:
    """Raise CheckpointError, naming the keys that differ, when the run's checkpoints do not fit the recipe."""
    before = load(folder / RECIPE)
    if before.hash() == recipe.hash():
        return
    keys = differences(before.binding(), recipe.binding())
    raise CheckpointError(
        f"the run was made with another recipe: {', '.join(keys)} differ{'s' if len(keys) == 1 else ''}",
        where=str(folder),
        hint="resume with the run's own recipe.toml, or start a new run with another --out",
    )


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted paths at which two plain values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    return [] if old == new else [path]


def quoted(*parts: object) -> str:
    """A command line that can be pasted into a shell."""
    return shlex.join(str(part) for part in parts)
