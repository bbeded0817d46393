"""An answer in the internal form, as all dialects spell it. Contract: plain data and the encoding that they share.

Log-probs are of the sampling distribution; `bytes` tells what a token is where it is not whole characters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import orjson

from inspan.engine.base import Sample
from inspan.trace.records import ToolCall

dump: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_LOGPROB: Final = -9999.0  # what the dialects say for a probability of zero


class Piece(NamedTuple):
    """Some text of a choice, as it comes."""

    kind: Literal["reasoning", "text"]
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled answer as the harness is to see it. `calls` are those that have a name.

    `finish` is "stop", "tool_calls" or "length"; `stopped_by` the stop string that ended it. `reasoning_id` stands for
    the thinking where a dialect hands it back without its text.
    """

    index: int
    content: str
    calls: tuple[ToolCall, ...]
    finish: str
    logprobs: list[dict[str, Any]] | None = None
    reasoning: str = ""
    reasoning_id: str = ""
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; `cached` of the prompt's came from the prefix cache, `reasoning` of the completion's are
    thinking."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer. `id` is that of its first call; dialects put their own prefix before it. `thinking_id` stands for
    the first choice's thinking, should there be any."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    thinking_id: str = ""


def encode(body: dict[str, Any]) -> bytes:
    """A body as JSON."""
    try:
        return orjson.dumps(body)
    except TypeError:  # a lone surrogate in what the model wrote, or a long integer in what it echoes
        return dump(body).encode()


def logprob_entries(
    sample: Sample, token_bytes: Callable[[int], bytes | None], stop_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The log-probs of a sample's tokens (the end of turn left out) in the shape of OpenAI's dialects."""
    entries = []
    for at, token in enumerate(sample.tokens):
        if token in stop_ids:
            continue
        entry = _entry(token_bytes(token), sample.logprobs[at])
        top = sample.top[at] if at < len(sample.top) else ()
        entry["top_logprobs"] = [_entry(token_bytes(other), logprob) for other, logprob in top]
        entries.append(entry)
    return entries


def _entry(raw: bytes | None, logprob: float) -> dict[str, Any]:
    text = "" if raw is None else raw.decode("utf-8", "replace")
    spelled = None if raw is None else list(raw)
    return {"token": text, "logprob": logprob if math.isfinite(logprob) else _NO_LOGPROB, "bytes": spelled}
