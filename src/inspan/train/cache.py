"""Models that are made on first use and kept. Contract: a directory is complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from inspan.errors import StoreError


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The directory of a model in the user's cache; `make` fills it on first use. Raises `StoreError`, and what it
    raises."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inspan"
    target = home / name
    if (target / "config.json").is_file():
        return target
    partial = home / f".{name}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # else another process was faster
            raise StoreError(f"cannot write the model: {error}", where=str(home)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
