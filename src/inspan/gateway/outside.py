"""Outside models: a request passes through to another server, and its answer is recorded as context. Contract: nothing
of it is ever trained; its tokens are rendered, not sampled.

Tool call ids are minted anew, so that `X-Parent-Call` and matching work as for our own policies.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from inspan.errors import EngineError, InfrastructureError, RequestError, StoreError
from inspan.gateway.base import OutsideChat
from inspan.gateway.dialects.chat_out import chat_body
from inspan.gateway.exchange import Flight, as_fault, sealed
from inspan.gateway.live import LiveRollout, SessionState
from inspan.gateway.render import ParsedCall
from inspan.gateway.reply import Choice, Reply, Usage
from inspan.gateway.request import ModelRequest
from inspan.gateway.schema import call_error
from inspan.gateway.scribe import Scribe
from inspan.trace.graph import content_text
from inspan.trace.records import Call, ToolCall

_SETUP: Final = (401, 403, 404)  # statuses that say our own key or model name is wrong


class OutsideExchange:
    """A request to an outside model, admitted and laid. Raises `RequestError` at a limit."""

    def __init__(
        self, live: LiveRollout, state: SessionState, request: ModelRequest, scribe: Scribe, fault_key: object
    ) -> None:
        self._live, self._state, self._request, self._scribe = live, state, request, scribe
        self._fault_key = fault_key
        started = live.clock()
        turn = live.admit(state, request.n)
        try:
            laid = state.lay(scribe, live.graph, request)
        except BaseException:
            live.forgo(state, request.n)
            raise
        self._prompt = len(laid.prompt)
        self._flights = [
            Flight(
                state,
                f"{state.record.id}#{turn + i}.{serial}",
                turn + i,
                laid.leaf,
                self._prompt,
                live.clock,
                started,
            )
            for i, serial in enumerate(live.ask(state, laid.leaf, request.n))
        ]

    async def reply(self, chat: OutsideChat, created: int) -> Reply:
        """Ask, record and commit. Raises `RequestError`, `InfrastructureError` or `StoreError`."""
        live, state = self._live, self._state
        answer = await self._ask(chat)
        try:
            choices = [
                self._record(i, answer["choices"][i]) for i in range(min(len(answer["choices"]), len(self._flights)))
            ]
            usage = answer.get("usage") or {}
            counted = Usage(usage.get("prompt_tokens", self._prompt), usage.get("completion_tokens", 0))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise self._fault(EngineError(f"an outside answer that cannot be read: {error!r}")) from error
        live.faults.pop(self._fault_key, None)
        name = self._request.model or state.record.agent
        return Reply(self._flights[0].call_id, created, name, tuple(choices), counted)

    async def _ask(self, chat: OutsideChat) -> Mapping[str, Any]:
        live, state, first = self._live, self._state, self._flights[0]
        body = chat_body(self._request)
        body["model"] = state.record.policy
        first.task = asyncio.current_task()
        live.flights.update(self._flights)
        try:
            answer = await chat.chat(body)
        except asyncio.CancelledError:
            if first.settled and first.called_off():
                raise sealed() from None
            if first.settled:
                raise
            for flight in self._flights:
                with suppress(StoreError):  # commit has marked the rollout incomplete
                    live.commit_now(state, flight.ended("cancelled"))
            raise
        except RequestError as error:
            if error.status not in _SETUP:  # the request is at fault
                with suppress(StoreError):  # commit has marked the rollout incomplete
                    live.commit_now(state, first.ended("error", str(error)))
                raise
            raise self._fault(EngineError(f"the outside model refuses us: {error}")) from error
        except Exception as error:
            raise self._fault(as_fault(error)) from error
        finally:
            live.flights.difference_update(self._flights)
            state.in_flight -= len(self._flights)
        if first.settled:
            raise sealed()
        return answer

    def _fault(self, error: InfrastructureError) -> InfrastructureError:
        self._live.faults[self._fault_key] = str(error)
        with suppress(StoreError):  # commit has marked the rollout incomplete
            self._live.commit_now(self._state, self._flights[0].ended("error", str(error)))
        return error

    def _record(self, index: int, answer: Mapping[str, Any]) -> Choice:
        live, state, flight = self._live, self._state, self._flights[index]
        content = content_text(answer["message"].get("content"))
        calls = self._calls(flight, index, answer["message"].get("tool_calls") or ())
        finish = str(answer.get("finish_reason") or "stop")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls]
        delta = self._scribe.render_made_up(live.graph, flight.leaf, message)
        live.settle()
        node = live.graph.draft_sample(
            state.record.id, flight.leaf, message, opening=delta, tokens=(), logprobs=(), versions=()
        )
        record = Call(
            flight.call_id, state.record.id, flight.turn, flight.leaf, node.id, finish, calls, self._prompt, len(delta),
            started=flight.started, ended=live.clock(),
        )  # fmt: skip
        live.commit_now(state, record, node)
        return Choice(index, content, calls, finish)

    def _calls(self, flight: Flight, index: int, calls: Any) -> tuple[ToolCall, ...]:
        serial = int(flight.call_id.rpartition(".")[2])
        seed = self._live.turn_seed(self._state, flight.leaf, serial)
        made = []
        for at, call in enumerate(calls):
            arguments = call["function"].get("arguments") or "{}"
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments)
            name = str(call["function"]["name"])
            error = call_error(ParsedCall(name, arguments), self._request.tools.functions)
            made.append(ToolCall(self._live.mint(self._state, flight.turn, seed, at), name, arguments, error))
        return tuple(made)
