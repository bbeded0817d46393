"""Traces and training data as JSONL or Parquet. Contract: rows are plain; a file appears complete or not at all.

`trace_rows` gives one row a message: who said what, which tokens it added, what was sampled at which version.
`training_rows` gives one row a chain: ids, mask, log-probs, versions, advantages, reward, as a learner takes them.
Sampled ids are exported as they were sampled; nothing is tokenised here.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from inspan.errors import InputError, StoreError
from inspan.trace.atif import atif_documents
from inspan.trace.chains import trained_chains
from inspan.trace.otel import otlp_requests
from inspan.trace.records import Rollout, Scored
from inspan.trace.store import TraceStore
from inspan.trace.store_rows import Credit

_BATCH, _BATCH_VALUES = 256, 1_000_000  # most rows of a batch, and most values of their lists

TRACE_TYPES: dict[str, str] = {
    "rollout": "string",
    "group": "string",
    "member": "int64",
    "task": "string",
    "terminal": "string",
    "session": "string",
    "agent": "string",
    "policy": "string",
    "trainable": "bool",
    "parent_session": "string",
    "parent_call": "string",
    "node": "int64",
    "parent": "int64",
    "role": "string",
    "message": "string",
    "tokens": "list<int64>",
    "start": "int64",
    "logprobs": "list<float64>",
    "versions": "list<int64>",
    "fork": "string",
    "call": "string",
    "turn": "int64",
    "finish": "string",
    "invalid": "int64",
}
"""Columns of `trace_rows`: `message` is JSON; `tokens[start:]` were sampled; `invalid` counts invalid tool calls."""

TRAINING_TYPES: dict[str, str] = {
    "rollout": "string",
    "group": "string",
    "member": "int64",
    "task": "string",
    "terminal": "string",
    "attempt": "int64",
    "fingerprint": "string",
    "reward": "float64",
    "terms": "string",
    "update": "int64",
    "session": "string",
    "agent": "string",
    "policy": "string",
    "chain": "int64",
    "tokens": "list<int64>",
    "mask": "list<bool>",
    "logprobs": "list<float64>",
    "versions": "list<int64>",
    "turns": "list<int64>",
    "advantages": "list<float64>",
    "weights": "list<float64>",
}
"""Columns of `training_rows`: `mask` marks tokens that may be trained, each under it once; `terms` is JSON; `reward` is
null when unscored, `update` when the rollout was not in one. `chain` is the id of the last node. `advantages` and
`weights` are what the update learned with, null for a chain that it left out (a group without differences, say)."""


def trace_rows(rollouts: Iterable[Rollout]) -> Iterator[dict[str, Any]]:
    """One row a message, in the order of the nodes."""
    for rollout in rollouts:
        sessions = {session.id: session for session in rollout.sessions}
        calls = {call.node: call for call in rollout.calls if call.node is not None}
        for node in rollout.nodes:
            session, call = sessions[node.session], calls.get(node.id)
            yield _head(rollout) | {
                "session": session.id,
                "agent": session.agent,
                "policy": session.policy,
                "trainable": session.trainable,
                "parent_session": session.parent,
                "parent_call": session.parent_call,
                "node": node.id,
                "parent": node.parent,
                "role": str(node.message.get("role", "")),
                "message": json.dumps(dict(node.message), ensure_ascii=True),
                "tokens": list(node.tokens),
                "start": node.start,
                "logprobs": list(node.logprobs),
                "versions": list(node.versions),
                "fork": node.fork,
                "call": call.id if call else None,
                "turn": call.turn if call else None,
                "finish": call.finish if call else None,
                "invalid": sum(t.error is not None for t in call.tool_calls) if call else None,
            }


class Learned(NamedTuple):
    """A scored rollout with what became of it: the update that it was in, and the credits of its chains by leaf."""

    scored: Scored
    update: int | None = None
    credits: Mapping[int, Credit] = MappingProxyType({})


def training_rows(learned: Iterable[Learned]) -> Iterator[dict[str, Any]]:
    """One row a chain that trains at least one token; a rollout that is not trainable has none."""
    for one, update, credits in learned:
        for chain in trained_chains(one.rollout):
            credit = credits.get(chain.nodes[-1])
            yield _head(one.rollout) | {
                "attempt": one.rollout.attempt,
                "fingerprint": one.rollout.fingerprint,
                "reward": one.reward,
                "terms": json.dumps(one.terms),
                "update": update,
                "session": chain.session,
                "agent": chain.agent,
                "policy": chain.policy,
                "chain": chain.nodes[-1],
                "tokens": list(chain.tokens),
                "mask": list(chain.trained),
                "logprobs": list(chain.logprobs),
                "versions": list(chain.versions),
                "turns": list(chain.turns),
                "advantages": None if credit is None else credit.advantages,
                "weights": None if credit is None else credit.weights,
            }


def stored_rollouts(store: TraceStore) -> Iterator[Rollout]:
    """The finished rollouts of a store, in the order of dispatch."""
    for row in store.rollouts():
        if row.terminal is not None:
            yield store.load_rollout(row.id)


def stored_learned(store: TraceStore) -> Iterator[Learned]:
    """The scored rollouts of a store with what became of them, in the order of dispatch."""
    for row in store.rollouts():
        scored = store.load_scored(row.id) if row.scored else None
        if scored is not None:
            yield Learned(scored, row.trained, store.load_credits(row.id))


def export_traces(store: TraceStore, path: str | Path) -> int:
    """Write all finished rollouts' messages to a `.jsonl` or `.parquet` file; returns the number of rows."""
    return write_rows(trace_rows(stored_rollouts(store)), path, TRACE_TYPES)


def export_training(store: TraceStore, path: str | Path) -> int:
    """Write all scored rollouts' chains to a `.jsonl` or `.parquet` file; returns the number of rows."""
    return write_rows(training_rows(stored_learned(store)), path, TRAINING_TYPES)


def export_atif(store: TraceStore, path: str | Path) -> int:
    """Write all finished rollouts as ATIF, a document a line; returns their number."""
    return _write_lines(atif_documents(stored_rollouts(store)), path)


def export_spans(store: TraceStore, path: str | Path, *, content: bool = False) -> int:
    """Write all finished rollouts' spans as OTLP JSON, a request a line; returns the number of rollouts."""
    return _write_lines(otlp_requests(stored_rollouts(store), content=content), path)


def write_rows(rows: Iterable[Mapping[str, Any]], path: str | Path, types: Mapping[str, str]) -> int:
    """Write rows in the format that the suffix names; returns their number. InputError for another suffix."""
    writers = {".jsonl": write_jsonl, ".parquet": write_parquet}
    suffix = Path(path).suffix
    if suffix not in writers:
        raise InputError(f"unknown format {suffix!r}", where=str(path), hint="end the file name in .jsonl or .parquet")
    return writers[suffix](rows, path, types)


def write_jsonl(rows: Iterable[Mapping[str, Any]], path: str | Path, types: Mapping[str, str]) -> int:
    """Write rows as JSON lines. StoreError when the file cannot be written."""
    return _write_lines(({name: row[name] for name in types} for row in rows), path)


def _write_lines(rows: Iterable[Mapping[str, Any]], path: str | Path) -> int:
    count = 0
    part = _part(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
                count += 1
            _flush(file)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def write_parquet(rows: Iterable[Mapping[str, Any]], path: str | Path, types: Mapping[str, str]) -> int:
    """Write rows as Parquet (zstd). Needs the extra `parquet`; StoreError when the file cannot be written."""
    arrow, parquet = _arrow()
    schema = arrow.schema([(name, _arrow_type(arrow, kind)) for name, kind in types.items()])
    count = 0
    part = _part(path)
    try:
        with part.open("wb") as file:
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for batch in batches(rows):
                    writer.write_table(arrow.Table.from_pylist(batch, schema=schema))
                    count += len(batch)
            _flush(file)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows in batches that are bounded by what they hold, so that long chains take no more memory than short ones."""
    batch: list[dict[str, Any]] = []
    values = 0
    for row in rows:
        size = sum(len(value) for value in row.values() if isinstance(value, list))
        if batch and (len(batch) == _BATCH or values + size > _BATCH_VALUES):
            yield batch
            batch, values = [], 0
        batch.append(dict(row))
        values += size
    if batch:
        yield batch


def _head(rollout: Rollout) -> dict[str, Any]:
    task = rollout.task
    name = task.get("id") if isinstance(task, Mapping) else getattr(task, "id", None)
    return {
        "rollout": rollout.id,
        "group": rollout.group,
        "member": rollout.member,
        "task": None if name is None else str(name),
        "terminal": str(rollout.terminal),
    }


def _part(path: str | Path) -> Path:
    return Path(path).with_name(Path(path).name + ".part")


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _unwritable(path: str | Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot be written: {error.strerror or error}", where=str(path), hint="check the folder and disk"
    )


def _arrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError("Parquet needs pyarrow", hint='pip install "inspan[parquet]", or export to .jsonl') from error


def _arrow_type(arrow: Any, kind: str) -> Any:
    inner = {"string": arrow.string(), "int64": arrow.int64(), "float64": arrow.float64(), "bool": arrow.bool_()}
    return arrow.list_(inner[kind[5:-1]]) if kind.startswith("list<") else inner[kind]
