"""`inspan export` and `inspan view`: what a run directory holds, in a form for other tools and for people."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from inspan import report
from inspan.errors import InputError

if TYPE_CHECKING:
    from inspan.trace.store import TraceStore

FORMATS = {"jsonl": ".jsonl", "parquet": ".parquet", "atif": ".jsonl", "otel": ".jsonl"}
KINDS = ("trace", "training")
STORE = "trace.sqlite"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"


@dataclass(frozen=True, slots=True)
class Export:
    """What to write, and where to."""

    fmt: str = "jsonl"
    what: str = "trace"
    out: Path | None = None
    content: bool = False
    endpoint: str | None = None


def export(run: Path, options: Export) -> None:
    """Write a run's traces or training data to one file, or send its spans to a collector."""
    fmt, what = options.fmt, options.what
    for given, known, option in ((fmt, tuple(FORMATS), "--format"), (what, KINDS, "--what")):
        if given not in known:
            raise InputError(f"unknown value {given!r}", where=option, hint=f"known: {', '.join(known)}")
    if what == "training" and fmt in ("atif", "otel"):
        raise InputError(
            f"{fmt} is a format of traces", where="--what", hint="training data: --format jsonl or parquet"
        )
    if (options.endpoint or options.content) and fmt != "otel":
        raise InputError("only spans have content or an endpoint", where="--format", hint="give --format otel")
    store_path = run / STORE if run.is_dir() else run
    if not store_path.is_file():
        hint = "give the folder of a run that `inspan train` wrote"
        raise InputError("no trace store", where=str(store_path), hint=hint)
    from inspan.trace import export as writers
    from inspan.trace.store import TraceStore

    with TraceStore(store_path, create=False) as store:
        if options.endpoint:
            print(f"{_send(store, options.endpoint, options.content)} rollouts: {options.endpoint}")
            return
        name = f"{what}{FORMATS[fmt]}" if fmt in ("jsonl", "parquet") else f"{what}.{fmt}{FORMATS[fmt]}"
        target = options.out or store_path.parent / name
        if target.suffix != FORMATS[fmt]:
            hint = f"name it {target.stem}{FORMATS[fmt]}"
            raise InputError(f"{target.name} does not end in {FORMATS[fmt]}", where="--out", hint=hint)
        if fmt == "atif":
            rows = writers.export_atif(store, target)
        elif fmt == "otel":
            rows = writers.export_spans(store, target, content=options.content)
        else:
            rows = (writers.export_traces if what == "trace" else writers.export_training)(store, target)
    print(f"{rows} rows: {target}")


def _send(store: TraceStore, endpoint: str, content: bool) -> int:
    """Send all spans to a collector by OTLP over HTTP (JSON); the number of rollouts."""
    import httpx2

    from inspan.trace.export import stored_rollouts
    from inspan.trace.otel import otlp_requests

    headers = _headers(os.environ.get(HEADERS, ""))
    url, count = endpoint.rstrip("/"), 0
    url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
    try:
        with httpx2.Client(timeout=30, headers=headers) as client:
            for request in otlp_requests(stored_rollouts(store), content=content):
                client.post(url, json=request).raise_for_status()
                count += 1
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:
        raise InputError(f"the collector does not take them after {count} rollouts: {error}", where=url,
                         hint="check --otlp-endpoint, e.g. http://127.0.0.1:4318") from None  # fmt: skip
    return count


def _headers(text: str) -> dict[str, str]:
    """Headers as OpenTelemetry's own variable gives them: "name=value,name=value", values percent-encoded."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if any(not name.strip() or not sign for name, sign, _ in pairs):
        raise InputError("headers are name=value, with commas between them", where=HEADERS)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


def view(run: Path) -> None:
    """Write a run's report anew, from whatever it holds by now, and print where it is."""
    print(report.build(run))
