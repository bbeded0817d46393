"""A model request in the one internal form that all dialects come to. Contract: plain data.

Messages are those of `inspan.trace.records.Message`: text content, thinking under `reasoning`, and the tool schemas on
the root message, as functions in the shape of Chat Completions whatever the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inspan.trace.graph import KeyedMessage, ToolList

if TYPE_CHECKING:
    from inspan.gateway.dialects.base import Dialect


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A checked request. None means: not given.

    `custom` names the tools that take free text: they are offered as functions with one string, `input`.
    `prefill` says that the last message, an assistant's, is to be continued. `previous` is the id of an answer whose
    conversation this request goes on from: its messages come before `messages`.
    """

    dialect: Dialect
    model: str
    messages: Sequence[KeyedMessage]
    tools: ToolList
    tool_choice: str | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    custom: frozenset[str] = frozenset()
    prefill: bool = False
    previous: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)  # as it was sent
    continues: Sequence[KeyedMessage] | None = None  # the messages of the request before, when these begin with them


def begins(messages: Sequence[KeyedMessage], with_: Sequence[KeyedMessage]) -> bool:
    """Whether messages begin with those of an earlier request, the very same objects."""
    return 0 < len(with_) <= len(messages) and messages[len(with_) - 1] is with_[-1]


def taken_up(messages: Sequence[KeyedMessage], before: ModelRequest | None) -> Sequence[KeyedMessage]:
    """The messages, of which those at the start that equal the ones of a request before are its very objects."""
    if before is None:
        return messages
    same = 0
    for old, new in zip(before.messages, messages, strict=False):
        if old != new:
            break
        same += 1
    return [*before.messages[:same], *messages[same:]]
