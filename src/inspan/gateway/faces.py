"""What a request shows the model, as a fingerprint counts it. Contract: looks, and changes nothing; each kind of
request of a rollout is looked at once, before it is admitted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from inspan.errors import ParityError, RequestError
from inspan.gateway.request import ModelRequest
from inspan.parity.face import Face
from inspan.parity.watch import Watch
from inspan.trace.records import Call, Session

WRITTEN: Final = "⟨written by a model⟩"
_LEAST: Final = 8  # characters of an argument that is looked for inside a prompt: shorter ones are there by chance
_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "stop",
    "stop_sequences", "tool_choice", "parallel_tool_calls", "presence_penalty", "frequency_penalty", "logit_bias",
    "response_format", "text", "reasoning", "reasoning_effort", "thinking", "verbosity", "truncation",
)  # fmt: skip
_COMMENT: Final = re.compile(r"\s*\([^()]*\)")
# Libraries: they say nothing of the agent that uses them.
_LIBRARY: Final = re.compile(
    r"(?:(?:Async)?(?:OpenAI|Anthropic)/[A-Za-z]+|(?:python-)?httpx2?|python-requests|Python-urllib|aiohttp|node-fetch"
    r"|node|undici|axios|Go-http-client|okhttp|reqwest|curl)\b.*",
    re.IGNORECASE | re.DOTALL,
)


class Observer:
    """Shows a watch what the requests of one rollout show the model."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._seen: set[tuple[Any, ...]] = set()

    def look(self, request: ModelRequest, session: Session, calls: Callable[[], Iterable[Call]], client: str) -> None:
        """Look at a request of a session; `calls` gives those of the rollout so far. Raises `RequestError` (409) for
        one that the watch refuses."""
        root = request.messages[0]
        system = root["content"] if root["role"] == "system" else ""
        sampling = {name: request.body[name] for name in _SAMPLING if request.body.get(name) is not None}
        told = repr(sampling) if sampling else ""
        key = (session.agent, session.parent is None, system, request.tools.key, told, request.dialect.name, client)
        if key in self._seen:
            return
        if session.parent is not None:
            system = without_written(system, calls())
        face = Face.of(
            dialect=request.dialect.name,
            client=client_name(client),
            system=system,
            tools=request.tools,
            sampling=sampling,
        )
        try:
            self._watch.see(session.agent, face)
        except ParityError as error:
            raise RequestError(error.what, status=409, code="harness_drift") from error
        self._seen.add(key)


def client_name(agent: str) -> str:
    """The agent that a user-agent header names, without what it says of the machine: "codex_cli_rs/0.60.1". "" where
    only a library is named."""
    words = _COMMENT.sub("", agent).split()
    name = " ".join(word for word in words if "/" in word or word[0].isdigit())  # others name a terminal, say
    return "" if _LIBRARY.fullmatch(name) else name


def without_written(system: str, calls: Iterable[Call]) -> str:
    """A sub-agent's prompt without what a model of this rollout wrote of it (as an argument of a tool call)."""
    texts = {text for call in calls for made in call.tool_calls for text in _texts(made.arguments)}
    if system.strip() and system.strip() in {text.strip() for text in texts}:
        return WRITTEN
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        if len(text) >= _LEAST:
            system = system.replace(text, WRITTEN)
    return system


def _texts(arguments: str) -> Iterator[str]:
    try:
        todo = [json.loads(arguments)]
    except ValueError:
        return
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list):
            todo += value
