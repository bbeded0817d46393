"""The tool loop that every built-in agent runs. Contract: it keeps to its budget; the last turn it asks to answer now.

A turn costs `max(1, direct tool calls)` critical steps, plus what the slowest sub-agent of the turn took (recipes'
critical steps). The gateway counts the same from the outside and is the hard stop.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import openai

from inspan.errors import EngineError, LimitExceeded
from inspan.harness.base import PARENT_CALL_HEADER, Endpoint
from inspan.harness.replies import read_message

ANSWER_NOW = "Answer now."
HARD_STOPS = ("budget_exhausted", "context_length_exceeded")


@dataclass(slots=True)
class ToolRequest:
    """A tool call as it came back from the model; `arguments` is None when they were not a JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | None


@dataclass(slots=True)
class TurnResult:
    """Tool results by call id, and the critical steps that sub-agents took beyond the turn's own."""

    texts: dict[str, str]
    direct: int
    delegated_steps: int = 0


Execute = Callable[[Sequence[ToolRequest], int | None], Awaitable[TurnResult]]
"""Runs the tool calls of one turn, given the critical steps left after the turn's own cost."""


def connect(endpoint: Endpoint) -> openai.AsyncOpenAI:
    """The ordinary client for an endpoint."""
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url, api_key=endpoint.api_key, http_client=endpoint.http_client, max_retries=2
    )


@dataclass(slots=True)
class Agent:
    """One agent's conversation with its model."""

    client: openai.AsyncOpenAI
    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    max_tokens: int
    parent_call: str | None = None
    temperature: float | None = None  # None: the server's choice

    async def turn(self) -> Mapping[str, Any]:
        """One model call; the reply is appended to the conversation and returned. Raises `LimitExceeded`."""
        body: dict[str, Any] = {"model": self.model, "messages": self.messages, "max_tokens": self.max_tokens}
        if self.tools:
            body["tools"] = self.tools
        if self.temperature is not None:
            body["temperature"] = self.temperature
        headers = {PARENT_CALL_HEADER: self.parent_call} if self.parent_call else {}
        try:
            # The client's plain `post`: its typed `create` walks through every message again at each turn.
            reply: Any = await self.client.post(
                "/chat/completions", cast_to=object, body=body, options={"headers": headers}
            )
        except (openai.PermissionDeniedError, openai.BadRequestError) as error:
            if error.code in HARD_STOPS:
                raise LimitExceeded(f"the model server stopped the episode: {error.code}") from error
            raise
        except (ValueError, RecursionError) as error:  # openai lets the faults of the JSON reader through
            raise EngineError(
                f"the model server's answer is not JSON: {error}", where=str(self.client.base_url)
            ) from error
        kept = read_message(reply, str(self.client.base_url))
        self.messages.append(kept)
        return kept


async def run_loop(agent: Agent, execute: Execute, *, budget: int | None) -> tuple[str, int]:
    """Turn after turn until the model answers without a tool call; returns the answer and the critical steps spent.

    With one step left the model is asked to answer now, and what it writes then is the answer, tool calls or not.
    """
    spent = 0
    while True:
        last = budget is not None and spent + 1 >= budget
        if last and spent:
            agent.messages.append({"role": "user", "content": ANSWER_NOW})
        reply = await agent.turn()
        requests = requests_of(reply)
        if not requests or last:
            return reply["content"], spent + 1
        result = await execute(requests, None if budget is None else budget - spent)
        spent += max(1, result.direct) + result.delegated_steps
        for request in requests:
            agent.messages.append({"role": "tool", "tool_call_id": request.id, "content": result.texts[request.id]})


def requests_of(reply: Mapping[str, Any]) -> list[ToolRequest]:
    """The tool calls of a reply."""
    return [_request(call) for call in reply.get("tool_calls", ())]


def _request(call: Mapping[str, Any]) -> ToolRequest:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    return ToolRequest(call["id"], call["function"]["name"], arguments if isinstance(arguments, dict) else None)
