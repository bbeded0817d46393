"""`inspan train`, `inspan eval` and `inspan warmstart`: from a recipe to a run directory."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from inspan import report
from inspan.cli import folders
from inspan.cli.shell import Stopped
from inspan.config import Recipe, dump_toml, load


def overridden(settings: Sequence[str], seed: int | None, deterministic: bool) -> list[str]:
    """`--set` options, with the two that have a name of their own last."""
    extra = [f"seed={seed}"] if seed is not None else []
    return [*settings, *extra, *(["deterministic=true"] if deterministic else [])]


def train(
    target: Path, settings: Sequence[str], *, out: Path | None, resume: bool, dry_run: bool, verify: bool = False
) -> None:
    """Train as a recipe says, then write the report and print the table. `--dry-run` prints the resolved recipe."""
    recipe = load(folders.recipe_path(target), settings)
    if dry_run:
        print(dump_toml(recipe), end="")
        return
    folder = folders.choose(recipe, target, out, resume=resume)
    with folders.held(folder):
        if resume:
            folders.check_resumable(recipe, folder)
        folders.write_recipe(recipe, folder)
        summary = _run(recipe, folder, resume=resume, verify=verify)
        page = report.build(folder)
    console = Console()
    report.print_summary(summary, console)
    _print_verified(summary)
    print(f"report: {page}")


def _run(recipe: Recipe, folder: Path, *, resume: bool, verify: bool) -> dict:
    progress = report.make_progress()
    try:
        from inspan.train import run

        run(recipe, out=folder, resume=resume, progress=progress, verify=verify)
    except KeyboardInterrupt as stop:
        progress.finish(None)
        report.build(folder)
        raise Stopped(saved(folder), stop) from None
    except BaseException:
        progress.finish(None)  # leaves the terminal as it was before the error is printed
        raise
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def _print_verified(summary: dict) -> None:
    checked = summary.get("verified")
    if checked:
        counts = ", ".join(f"{count:,} {what}" for what, count in checked.items() if what != "seconds")
        print(f"verified: {counts}; nothing broken; {checked['seconds']:.1f} s of checking")
        if not checked["logprobs"] and "updates" in summary:
            print("  but no log-prob was computed again: no update had a token to train on its own version's weights")


def saved(folder: Path) -> str:
    """What a stopped run has on disk, and the command that goes on from there."""
    steps = [int(m[1]) for p in (folder / "checkpoints").glob("*") if (m := re.search(r"-step-(\d+)$", p.name))]
    if not steps:
        again = folders.quoted("inspan", "train", folder, "--resume")
        return f"no checkpoint was written yet; start again with\n  {again}"
    command = folders.quoted("inspan", "train", folder, "--resume")
    return f"everything up to update {max(steps)} is saved in {folder}; continue with\n  {command}"


def evaluate(
    target: Path, settings: Sequence[str], *, as_json: bool, verify: bool = False, allow_drift: bool = False
) -> None:
    """Evaluate the arms of a recipe, or of a finished run, on held-out tasks and print the table."""
    recipe = load(folders.recipe_path(target), settings)
    console = Console(stderr=as_json)
    progress = report.make_progress(console)
    from inspan.train import evaluate as run

    own = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()  # a harness may print
    try:
        with own:
            folder = target if target.is_dir() else None
            summary = run(recipe, run=folder, progress=progress, verify=verify, allow_drift=allow_drift)
    finally:
        progress.finish(None)
    if as_json:
        print(json.dumps(summary))
    else:
        report.print_summary(summary)
        _print_verified(summary)
        for one in summary.get("drift", ()):
            print(f"differs from the training: {one}")


def warmstart(target: Path, settings: Sequence[str], *, out: Path | None) -> None:
    """Make a base model as a warm-start recipe says."""
    from inspan.warmstart import run

    folder = run(target, overrides=list(settings), out=out, write=print)
    print(f"model: {folder}")
