"""`inspan export` and `inspan view`: what a run directory holds, in a form for other tools and for people."""

from __future__ import annotations

from pathlib import Path

from inspan import report
from inspan.errors import InputError

FORMATS = ("jsonl", "parquet")
KINDS = ("trace", "training")
STORE = "trace.sqlite"


def export(run: Path, *, fmt: str, what: str, out: Path | None) -> None:
    """Write a run's traces (a row a message) or training data (a row a chain) to one file."""
    for given, known, option in ((fmt, FORMATS, "--format"), (what, KINDS, "--what")):
        if given not in known:
            raise InputError(f"unknown value {given!r}", where=option, hint=f"known: {', '.join(known)}")
    store_path = run / STORE if run.is_dir() else run
    if not store_path.is_file():
        hint = "give the folder of a run that `inspan train` wrote"
        raise InputError("no trace store", where=str(store_path), hint=hint)
    from inspan.trace.export import export_traces, export_training
    from inspan.trace.store import TraceStore

    target = out or store_path.parent / f"{what}.{fmt}"
    if target.suffix != f".{fmt}":
        raise InputError(f"{target.name} does not end in .{fmt}", where="--out", hint=f"name it {target.stem}.{fmt}")
    with TraceStore(store_path, create=False) as store:
        rows = (export_traces if what == "trace" else export_training)(store, target)
    print(f"{rows} rows: {target}")


def view(run: Path) -> None:
    """Write a run's report anew, from whatever it holds by now, and print where it is."""
    print(report.build(run))
