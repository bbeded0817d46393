"""Rollouts as plain JSON, for checkpoints. Contract: `load(json.loads(json.dumps(dump(x)))) == x`, bit for bit.

Token arrays are packed (`trace.packing`) and base64-encoded. Values inside tasks, messages and events may be anything
JSON holds, and tuples, which are told apart from lists.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from inspan.errors import CheckpointError
from inspan.tasks.base import Task
from inspan.trace.packing import pack_floats, pack_tokens, pack_versions, unpack_floats, unpack_tokens, unpack_versions
from inspan.trace.records import Call, Node, Rollout, Session, Terminal, ToolCall, ToolEvent

_TUPLE = "~tuple"
_DICT = "~dict"


def dump_task(task: Task) -> dict[str, Any]:
    """A task as plain JSON."""
    return {field.name: _plain(getattr(task, field.name)) for field in dataclasses.fields(task)}


def load_task(data: Mapping[str, Any]) -> Task:
    """The task that was dumped; CheckpointError when the record is damaged."""
    try:
        return Task(**{name: _value(value) for name, value in data.items()})
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"a task's record is damaged: {error}") from error


def dump_rollout(rollout: Rollout) -> dict[str, Any]:
    """A rollout as plain JSON, its task included."""
    if not isinstance(rollout.task, Task):
        raise TypeError(f"the task of rollout {rollout.id} is a {type(rollout.task).__name__}, not a Task")
    data = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    data["task"] = dump_task(rollout.task)
    data["terminal"] = rollout.terminal.value
    data["sessions"] = [_row(session) for session in rollout.sessions]
    data["nodes"] = [_dump_node(node) for node in rollout.nodes]
    data["calls"] = [{**_row(call), "tool_calls": [_row(tool) for tool in call.tool_calls]} for call in rollout.calls]
    data["tool_events"] = [_row(event) for event in rollout.tool_events]
    data["metrics"] = dict(rollout.metrics)
    return data


def load_rollout(data: Mapping[str, Any]) -> Rollout:
    """The rollout that was dumped; CheckpointError when the record is damaged."""
    try:
        fields = dict(data)
        fields["task"] = load_task(fields["task"])
        fields["terminal"] = Terminal(fields["terminal"])
        fields["sessions"] = [Session(**_values(row)) for row in fields["sessions"]]
        fields["nodes"] = [_load_node(row) for row in fields["nodes"]]
        fields["calls"] = [_load_call(row) for row in fields["calls"]]
        fields["tool_events"] = [ToolEvent(**_values(row)) for row in fields["tool_events"]]
        fields["metrics"] = dict(fields["metrics"])
        return Rollout(**fields)
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"a rollout's record is damaged: {error}") from error


def _dump_node(node: Node) -> dict[str, Any]:
    return {
        **_row(node),
        "tokens": _text(pack_tokens(node.tokens)),
        "logprobs": _text(pack_floats(node.logprobs)),
        "versions": _text(pack_versions(node.versions)),
    }


def _load_node(row: Mapping[str, Any]) -> Node:
    fields = _values(row)
    fields["tokens"] = unpack_tokens(_blob(fields["tokens"]))
    fields["logprobs"] = unpack_floats(_blob(fields["logprobs"]))
    fields["versions"] = unpack_versions(_blob(fields["versions"]))
    return Node(**fields)


def _load_call(row: Mapping[str, Any]) -> Call:
    fields = _values(row)
    fields["tool_calls"] = tuple(ToolCall(**tool) for tool in fields["tool_calls"])
    return Call(**fields)


def _text(blob: bytes) -> str:
    return base64.b64encode(blob).decode("ascii")


def _blob(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SKIP = ("tokens", "logprobs", "versions", "tool_calls")


def _row(record: Any) -> dict[str, Any]:
    fields = dataclasses.fields(record)
    return {f.name: None if f.name in _SKIP else _plain(getattr(record, f.name)) for f in fields}


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """A value as JSON; tuples, and mappings that JSON or this tagging would change, are tagged."""
    if isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not (value.keys() & {_TUPLE, _DICT}):
            return {key: _plain(item) for key, item in value.items()}
        return {_DICT: [[_plain(key), _plain(item)] for key, item in value.items()]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be kept in a checkpoint: use JSON values and tuples")


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_value(item) for item in value[_TUPLE])
        if value.keys() == {_DICT}:
            return {_value(key): _value(item) for key, item in value[_DICT]}
        return {key: _value(item) for key, item in value.items()}
    return value
