"""`inspan serve`: the gateway by itself, over a store that outlives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inspan.cli import folders
from inspan.config import load


def serve(target: Path, settings: Sequence[str], *, out: Path, host: str, port: int, allow_drift: bool = False) -> None:
    """Serve a recipe's model, or a run's newest weights, until a signal comes."""
    recipe = load(folders.recipe_path(target), settings)
    from inspan.train.serve import serve_gateway

    with folders.held(out):
        serve_gateway(
            recipe, out=out, run=target if target.is_dir() else None, host=host, port=port,
            tell=lambda line: print(line, flush=True), allow_drift=allow_drift,
        )  # fmt: skip
