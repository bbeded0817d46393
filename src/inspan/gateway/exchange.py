"""One request being served: from a checked request to recorded choices. Contract: HTTP stays outside.

`Exchange` is made without awaiting anything, so a request is laid onto the graph at once and no other comes between.
Each choice is then sampled, read back, and committed before it is returned.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from inspan.engine.base import Engine, Sample, SamplingParams
from inspan.engine.witness import CALLER
from inspan.errors import EngineError, InfrastructureError, RequestError, StoreError
from inspan.gateway.live import LiveRollout, SessionState, thinking_id
from inspan.gateway.render import Parsed, Reader, leaves_thinking
from inspan.gateway.reply import Choice, Piece, Reply, Usage, logprob_entries
from inspan.gateway.request import ModelRequest
from inspan.gateway.retries import Ask
from inspan.gateway.schema import call_error
from inspan.gateway.scribe import Scribe, shared
from inspan.gateway.stream import Detokeniser, Showing, StopFinder
from inspan.trace.records import Call, Tokens, ToolCall

_log = logging.getLogger("inspan.gateway")
_DEFAULT: Final = SamplingParams(max_tokens=2**31 - 1)


class Listener:
    """Hears the ids of a choice as they are sampled: finds stop strings, and shows text as soon as it may be shown.

    The engine may call it from a thread of its own.
    """

    def __init__(
        self,
        renderer: Reader,
        stops: Sequence[str],
        show: Callable[[Piece], None] | None,
        *,
        opened: bool = False,
        begun: str = "",
    ) -> None:
        self._detokeniser = Detokeniser(renderer.decode)
        self._finder = StopFinder(stops)
        self._showing = Showing(renderer.call_marker, stops, opened=opened, shown=begun)
        self._begun = begun
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._heard = 0

    def __call__(self, ids: Sequence[int]) -> bool:
        """Take new ids; True stops the engine."""
        self._heard += len(ids)
        return self._take(self._detokeniser.push(ids))

    def finish(self, tokens: Sequence[int]) -> tuple[str, str | None]:
        """The whole text, and the stop string that cut it, if one did. `tokens` are all that were sampled."""
        if self._heard < len(tokens):
            self._take(self._detokeniser.push(tokens[self._heard :]))
        self._take(self._detokeniser.finish())
        return self._finder.text, self._finder.found

    def remainder(self, choice: Choice) -> list[Piece]:
        """What of the thinking and the content has not been shown."""
        return self._showing.finish(choice.reasoning, self._begun + choice.content)

    def _take(self, piece: str) -> bool:
        if self._finder.at is not None:
            return True
        before = len(self._finder.text)
        stopped = self._finder.push(piece)
        if self._show is not None and not stopped:
            for shown in self._showing.push(self._finder.text[before:]):
                if threading.get_ident() == self._thread:
                    self._show(shown)
                else:
                    self._loop.call_soon_threadsafe(self._show, shown)
        return stopped


@dataclass(slots=True, eq=False)
class Flight:
    """A choice that the engine is sampling. `settled`: sealing has already recorded it as cancelled."""

    state: SessionState
    call_id: str
    turn: int
    leaf: int
    prompt_tokens: int
    clock: Callable[[], float]
    started: float
    task: asyncio.Task[Any] | None = None
    settled: bool = False

    def call_off(self) -> None:
        """Sealing: stop what the flight's task waits for."""
        self.settled = True
        if self.task is not None:
            self.task.cancel()

    def called_off(self) -> bool:
        """Take the cancellation of `call_off` back; False when someone else cancelled the task as well."""
        return self.task is not None and self.task.uncancel() == 0

    def ended(self, finish: str, error: str | None = None, *, ok: bool = True) -> Call:
        """The record of a choice that sampled nothing that could be kept."""
        return Call(self.call_id, self.state.record.id, self.turn, self.leaf, None, finish,
                    prompt_tokens=self.prompt_tokens, ok=ok, error=error,
                    started=self.started, ended=self.clock())  # fmt: skip


class Exchange:
    """A request, admitted and laid. Raises `RequestError` at a limit, or when the prompt does not fit.

    `fault_key` tells a request from others, so that a later success of the same one mends its fault.
    """

    def __init__(
        self,
        live: LiveRollout,
        state: SessionState,
        request: ModelRequest,
        scribe: Scribe,
        engine: Engine,
        ask: Ask,
    ) -> None:
        self.live, self.state, self.request = live, state, request
        self.fault_key = (state.record.id, ask.body)
        started = live.clock()
        whole = request.n == 1 and not request.logprobs and not request.prefill and not request.stop
        self._ask_name = ask.name if whole else ""
        self.cached = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._renderer = scribe.renderer
        self._engine = engine
        turn = live.admit(state, request.n)
        try:
            self._laid = state.lay(scribe, live.graph, request)
            self.prompt = self._laid.prompt
            self._begun = self._shown_before(request.messages[-1]["content"])
            self._room = check_room(live, state, engine, len(self.prompt))
        except BaseException:
            live.forgo(state, request.n)
            raise
        self._serials = live.ask(state, self._laid.leaf, request.n)
        self._flights = [
            Flight(
                state,
                f"{state.record.id}#{turn + i}.{serial}",
                turn + i,
                self._laid.leaf,
                len(self.prompt),
                live.clock,
                started,
            )
            for i, serial in enumerate(self._serials)
        ]

    def head(self, created: int) -> Reply:
        """The reply as far as it is known before anything is sampled."""
        name = self.request.model or self.state.record.agent
        thinking = thinking_id(self.live.turn_seed(self.state, self._laid.leaf, self._serials[0]))
        return Reply(self._flights[0].call_id, created, name, (), Usage(len(self.prompt), 0), thinking)

    def listener(self, show: Callable[[Piece], None] | None = None) -> Listener | None:
        """What listens to a choice while it is sampled; None when nothing has to."""
        if show is None and not self.request.stop:
            return None
        opened = not self._begun and leaves_thinking(self._renderer.decode(self._laid.opening))
        return Listener(self._renderer, self.request.stop, show, opened=opened, begun=self._begun)

    async def choices(self) -> list[Choice]:
        """All choices. When one fails, the others are cancelled."""
        if self.request.n == 1:
            return [await self.choice(0, self.listener())]
        tasks = [asyncio.ensure_future(self.choice(i, self.listener())) for i in range(self.request.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await give_up(tasks)

    def reply(self, choices: Sequence[Choice], created: int) -> Reply:
        """The reply, once all choices are there; a fault of the same request before is mended."""
        self.live.faults.pop(self.fault_key, None)
        usage = Usage(len(self.prompt), self.completion_tokens, self.cached, self.reasoning_tokens)
        return replace(self.head(created), choices=tuple(choices), usage=usage)

    async def choice(self, index: int, listener: Listener | None) -> Choice:
        """Sample, read back and commit one choice. Raises `RequestError`, `InfrastructureError` or `StoreError`."""
        flight, live = self._flights[index], self.live
        seed = live.turn_seed(self.state, self._laid.leaf, self._serials[index])
        params = self._params(int.from_bytes(seed[:8], "big") >> 1)
        policy = self.state.record.policy
        flight.task = asyncio.current_task()
        live.flights.add(flight)
        try:
            caller = CALLER.set(live.id)
            try:
                sample = await self._engine.sample(policy, self.prompt, params, listener)
            finally:
                CALLER.reset(caller)
            if sample.stop == "cancelled":
                raise EngineError("the engine cancelled the request", where=policy)
        except asyncio.CancelledError:
            if flight.settled and flight.called_off():
                raise sealed() from None
            if flight.settled:
                raise
            with suppress(StoreError):  # commit has marked the rollout incomplete
                live.commit_now(self.state, flight.ended("cancelled"))
            raise
        except RequestError as error:
            raise live.refuse(self.state, "tokens", str(error), status=400, code=CONTEXT_CODE) from error
        except Exception as error:
            raise self._fault(flight, index, as_fault(error)) from error
        finally:
            live.flights.discard(flight)
            self.state.in_flight -= 1
        if flight.settled:
            raise sealed()
        return await self._record(flight, index, seed, sample, listener)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _params(self, seed: int) -> SamplingParams:
        """A trainable session samples as its grant says, another as its requests ask; the length cap is the grant's."""
        request, given = self.request, self.live.sampling
        base = given or _DEFAULT
        own = given is None or not self.state.record.trainable
        left = self.live.left_to_sample()
        most = min(self._room, base.max_tokens, request.max_tokens or self._room, self._room if left is None else left)
        return SamplingParams(
            max_tokens=most,
            temperature=request.temperature if own and request.temperature is not None else base.temperature,
            top_p=request.top_p if own and request.top_p is not None else base.top_p,
            top_k=request.top_k if own and request.top_k is not None else base.top_k,
            stop_ids=self._renderer.stop_ids,
            seed=seed,
            top_logprobs=request.top_logprobs if request.logprobs else 0,
        )

    def _fault(self, flight: Flight, index: int, error: InfrastructureError) -> InfrastructureError:
        """The engine failed: nothing was sampled, the turn counts for nothing, and the rollout is marked."""
        self.live.faults[self.fault_key] = str(error)
        self.live.withdraw(self.state, self._laid.leaf, self._serials[index])
        with suppress(StoreError):  # commit has marked the rollout incomplete
            self.live.commit_now(self.state, flight.ended("error", str(error)))
        return error

    async def _record(
        self, flight: Flight, index: int, seed: bytes, sample: Sample, listener: Listener | None
    ) -> Choice:
        if listener is None:
            text, cut = self._renderer.decode(sample.tokens), None
        else:
            text, cut = listener.finish(sample.tokens)
        parsed = self._read(sample.tokens, text, cut=cut is not None)
        shown = parsed.shown.removeprefix(self._begun)
        calls = self._calls(flight.turn, seed, parsed)
        named = tuple(call for call in calls if call.name)
        finish = "length" if sample.stop == "length" and cut is None else "tool_calls" if named else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": parsed.shown}
        reasoning_id = ""
        if parsed.reasoning:
            self.reasoning_tokens += self._thinking_length(sample.tokens)
            reasoning_id = thinking_id(seed)
            message |= {"reasoning": parsed.reasoning, "reasoning_id": reasoning_id}
        if named:
            message["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in named]
        if self.request.tool_choice not in (None, "auto"):
            message["tool_choice"] = self.request.tool_choice
        await self._commit(flight, sample, message, calls, finish)
        self.cached = max(self.cached, sample.cached_tokens)
        self.completion_tokens += len(sample.tokens)
        logprobs = None
        if self.request.logprobs:
            logprobs = logprob_entries(sample, self._renderer.token_bytes, self._renderer.stop_ids)
        return Choice(index, shown, named, finish, logprobs, parsed.reasoning, reasoning_id, cut)

    def _shown_before(self, content: str) -> str:
        """What the harness has of the message already, when the request continues one."""
        laid = self._laid
        if not laid.prefill:
            return ""
        shown = self._renderer.parse(laid.prefill, opening=laid.generation_prompt).shown
        return content.lstrip("\n") if shown == content.strip("\n") else shown

    def _read(self, tokens: Tokens, text: str, *, cut: bool) -> Parsed:
        """The sampled message, with the unfinished one that it continues."""
        before, opening, tools = self._laid.prefill, self._laid.generation_prompt, self.request.tools
        if cut:
            return self._renderer.parse_text(self._renderer.decode(before) + text, opening=opening, tools=tools)
        return self._renderer.parse((*before, *tokens), opening=opening, tools=tools)

    def _thinking_length(self, tokens: Tokens) -> int:
        """How many of the sampled tokens are thinking: all before the first that is read as something else."""
        opening, tools = self._laid.generation_prompt, self.request.tools

        def said(count: int) -> bool:
            parsed = self._renderer.parse((*self._laid.prefill, *tokens[:count]), opening=opening, tools=tools)
            return bool(parsed.content or parsed.calls)

        return max(0, bisect_left(range(len(tokens) + 1), True, key=said) - 1)

    def _calls(self, turn: int, seed: bytes, parsed: Parsed) -> tuple[ToolCall, ...]:
        if not parsed.calls:
            return ()
        functions = self.request.tools.functions
        return tuple(
            ToolCall(self.live.mint(self.state, turn, seed, at), call.name, call.arguments, call_error(call, functions))
            for at, call in enumerate(parsed.calls)
        )

    async def _commit(
        self, flight: Flight, sample: Sample, message: Mapping[str, Any], calls: tuple[ToolCall, ...], finish: str
    ) -> None:
        live, record = self.live, self.state.record
        flaw = _flaw(sample, trained=record.trainable)
        if flaw is not None:
            live.faults[self.fault_key] = flaw
            live.commit_now(self.state, flight.ended("error", flaw, ok=False))
            raise EngineError(flaw, where=f"policy {record.policy!r}")
        node = None
        live.settle()
        if sample.tokens:
            node = live.graph.draft_sample(
                record.id,
                self._laid.leaf,
                message,
                opening=self._laid.opening,
                tokens=shared(sample.tokens),
                logprobs=tuple(sample.logprobs),
                versions=tuple(sample.versions),
            )
        call = Call(
            flight.call_id,
            record.id,
            flight.turn,
            self._laid.leaf,
            None if node is None else node.id,
            finish,
            calls,
            len(self.prompt),
            len(sample.tokens),
            started=flight.started,
            ended=live.clock(),
            ask=self._ask_name,
        )
        await live.commit(self.state, call, node)


CONTEXT_CODE: Final = "context_length_exceeded"


def check_room(live: LiveRollout, state: SessionState, engine: Engine, prompt: int, about: str = "") -> int:
    """How many tokens may be sampled after a prompt of so many: at least one, or else `RequestError`."""
    limit, context = live.limits.tokens, engine.context_length
    if limit is not None and limit <= context and prompt >= limit:
        raise live.refuse(state, "tokens", f"the context of {limit} tokens is used up")
    if prompt >= context:
        what = f"the prompt has {about}{prompt} tokens, and the context is {context} tokens long"
        raise live.refuse(state, "tokens", what, status=400, code=CONTEXT_CODE)
    return min(context, limit or context) - prompt


def as_fault(error: Exception) -> InfrastructureError:
    """What a model's server raised, as a fault of the infrastructure."""
    if isinstance(error, InfrastructureError):
        return error
    _log.error("the engine raised", exc_info=error)
    return EngineError(f"the engine raised {type(error).__name__}: {error}")


async def give_up(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and wait until it has ended."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)


def sealed() -> RequestError:
    """The error for a call that comes after sealing."""
    return RequestError("the rollout is sealed and takes no more calls", status=403, code="session_sealed")


def _flaw(sample: Sample, *, trained: bool) -> str | None:
    """Why a sample cannot be recorded as what was sampled, or None."""
    count = len(sample.tokens)
    if not count == len(sample.logprobs) == len(sample.versions):
        return f"the engine gave {count} tokens, {len(sample.logprobs)} log-probs, {len(sample.versions)} versions"
    if trained and not all(map(math.isfinite, sample.logprobs)):
        return "the engine gave a log-prob that is not finite"
    return None
