"""Records as rows of the store, and back. Contract: pure; what goes in comes out equal, numbers bit for bit.

Calls and messages, which are written while a harness waits, go through orjson. What it cannot hold (a lone surrogate
that a model or harness wrote, an integer beyond 64 bits) goes through the standard library, as ASCII.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import orjson

from inspan.trace.packing import pack_floats, pack_tokens, pack_versions, unpack_floats, unpack_tokens, unpack_versions
from inspan.trace.records import Call, ChainCredit, Node, ToolCall


class Credit(NamedTuple):
    """What a chain was trained with: a value a token."""

    advantages: list[float]
    weights: list[float]


PUT_NODE = "INSERT INTO nodes VALUES (?,?,?,?,?,?,?,?,?,?)"
PUT_CALL = "INSERT INTO calls VALUES (?,?,?)"


def node_row(key: int, node: Node) -> tuple[Any, ...]:
    """The row of a node of the rollout with this key."""
    return (
        key,
        node.id,
        node.session,
        node.parent,
        quick_json(node.message),
        pack_tokens(node.tokens),
        node.start,
        pack_floats(node.logprobs),
        pack_versions(node.versions),
        node.fork,
    )


def call_row(key: int, call: Call) -> tuple[int, str, str]:
    """The row of a call of the rollout with this key."""
    return key, call.id, quick_json(call)


def node_of(row: tuple[Any, ...]) -> Node:
    """The node of a row."""
    _, id_, session, parent, message, tokens, start, logprobs, versions, fork = row
    ids, probs = unpack_tokens(tokens), unpack_floats(logprobs)
    return Node(id_, session, parent, json.loads(message), ids, start, probs, unpack_versions(versions), fork)


def call_of(text: str) -> Call:
    """The call of a row's JSON."""
    data = json.loads(text)
    data["tool_calls"] = tuple(ToolCall(**call) for call in data["tool_calls"])
    return Call(**data)


def credit_rows(credits: Iterable[ChainCredit]) -> list[list[Any]]:
    """The credits of a rollout's chains as JSON: each chain's leaf, and its (length, advantage, weight) runs."""
    rows = []
    for credit in credits:
        pairs = groupby(zip(credit.advantages, credit.weights, strict=True))
        rows.append([credit.chain.nodes[-1], [[sum(1 for _ in run), *pair] for pair, run in pairs]])
    return rows


def credits_of(rows: Iterable[Sequence[Any]]) -> dict[int, Credit]:
    """Advantages and weights by leaf, a value a token, from `credit_rows`."""
    out = {}
    for leaf, runs in rows:
        advantages = [advantage for length, advantage, _ in runs for _ in range(length)]
        out[leaf] = Credit(advantages, [weight for length, _, weight in runs for _ in range(length)])
    return out


def fields(record: Any) -> dict[str, Any]:
    """A dataclass as a dict, one level deep (`dataclasses.asdict` copies deeply and is ten times slower)."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def is_record(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def quick_json(value: object) -> str:
    """JSON of a record or mapping in which no number is NaN or infinite. Raises TypeError for what JSON cannot hold."""
    try:
        return orjson.dumps(value, default=_plain).decode()
    except TypeError:
        return to_json(value)


def to_json(value: object) -> str:
    """JSON of anything that can be stored, NaN and infinities too. Raises TypeError for what JSON cannot hold."""
    return _encoder.encode(value)


def _plain(value: object) -> object:
    """What JSON cannot hold itself: records, mappings that are no dicts, numbers of numpy."""
    if is_record(value):
        return fields(value)
    if hasattr(value, "items"):
        return dict(value.items())  # type: ignore[attr-defined]
    if hasattr(value, "item"):
        return value.item()  # type: ignore[attr-defined]
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON")


_encoder = json.JSONEncoder(separators=(",", ":"), default=_plain)
