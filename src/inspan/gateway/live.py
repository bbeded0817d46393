"""The state of one rollout at the gateway. Contract: no I/O but what the recorder does; no HTTP, no engine.

Sessions are keyed by (parent tool call, role) and need no announcement: a first request opens its session, under the
call that it names or at the root. What was recorded here is what `seal` returns.

Invariants
- Seeds hang on (rollout seed, tool calls above, context, how often that context was asked), never on arrival order.
- A call enters `calls` when it is durable, or, when it could not be made so, as `ok=False`.
- Nothing enters after sealing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from inspan.engine.base import SamplingParams
from inspan.errors import RequestError, StoreError
from inspan.gateway.base import Grant, Limits, Role, Trace
from inspan.gateway.dialects import checks
from inspan.gateway.faces import Observer
from inspan.gateway.pace import Meter, Pace
from inspan.gateway.recorder import Entry, Recorder
from inspan.gateway.request import ModelRequest
from inspan.gateway.retries import Ask, Replies, recorded_replies
from inspan.gateway.scribe import Laid, Scribe, lay_prefilled
from inspan.parity.watch import Watch
from inspan.trace.graph import KeyedMessage, Match, MessageGraph
from inspan.trace.records import Call, Node, Session
from inspan.trace.steps import StepTree


@dataclass(slots=True, eq=False)
class SessionState:
    """A session with what the gateway remembers of it. `origin` seeds it: the hash of the calls above."""

    record: Session
    origin: bytes
    stored: bool = False
    turns: int = 0  # requests admitted so far, each choice counted
    in_flight: int = 0
    refused: bool = False
    asked: dict[int, int] = field(default_factory=dict)  # context leaf → how often it was sampled from
    replies: Replies = field(default_factory=Replies)
    laid: tuple[Sequence[KeyedMessage], Match] | None = None  # the messages laid last, and where they led

    def lay(self, scribe: Scribe, graph: MessageGraph, request: ModelRequest) -> Laid:
        """Lay a request onto the session's graph; what the last request has laid is not matched again."""
        known = None
        if self.laid is not None and self.laid[0] is request.continues:
            known = self.laid[1]
        session, messages = self.record.id, request.messages
        laid = lay_prefilled(scribe, graph, session, messages, known) if request.prefill else None
        depth = len(messages) - (laid is not None)
        laid = laid or scribe.lay(graph, session, messages, known)
        self.laid = (messages, Match(laid.leaf, depth, None))
        return laid


@dataclass(frozen=True, slots=True)
class Minted:
    """Where a tool call id was minted: the session and its turn, the seed of the turn, the call's index in it."""

    state: SessionState
    turn: int
    seed: bytes
    index: int


class LiveRollout:
    """One rollout between `open` and `seal`."""

    def __init__(
        self,
        grant: Grant,
        *,
        roles: Sequence[Role],
        limits: Limits,
        seed: int,
        sampling: SamplingParams | None,
        default_role: str,
        recorder: Recorder,
        pace: Pace | None = None,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.grant = grant
        self.clock = clock
        self._observer = None if watch is None else Observer(watch)
        self.meter = Meter(pace or Pace())
        self._sampled = 0
        self.id = grant.rollout
        self.roles = {role.name: role for role in roles}
        self.limits = limits
        self.sampling = sampling
        self.graph = MessageGraph()
        self.calls: list[Call] = []
        self.complete = True
        self.limit_hit: str | None = None
        self.sealed = False
        self.waiting = False  # whether a call waits for its commit
        self.faults: dict[object, str] = {}
        self.flights: set[Any] = set()  # choices that the engine is sampling now
        self._default_role = default_role
        self._seed = b"%d" % seed
        self._recorder = recorder
        self._steps = StepTree(width=limits.width)
        self._states: dict[tuple[str | None, str], SessionState] = {}
        self._minted: dict[str, Minted] = {}
        self._digests: dict[int, bytes] = {}
        self.latest: dict[str | None, ModelRequest] = {}  # by parent call: the request that the next may continue
        self._committed: set[int] = set()
        self._recorded: list[Session] = []  # sessions with a committed call, in the order of the first
        self._admitted = 0

    # ---- sessions and limits ------------------------------------------------------------------------------------

    def session(self, request: ModelRequest, ask: Ask) -> SessionState:
        """The session of a request; opened when it is the first. Raises `RequestError` for an unknown model or call."""
        role, parent_call = self._role(request, ask.role), ask.parent_call
        state = self._states.get((parent_call, role.name))
        if state is not None:
            return state
        if parent_call is None:
            origin = _digest(self._seed, role.name.encode())
            return self._open(Session(role.name, role.name, role.policy, role.trainable), origin)
        minted = self._minted.get(parent_call)
        if minted is None:
            raise RequestError(
                f"X-Parent-Call names {parent_call!r:.80}, which is no tool call of this rollout",
                code="unknown_parent_call",
            )
        above = minted.state.record
        origin = _digest(minted.seed, b"%d" % minted.index, role.name.encode())
        name = f"{above.id}/{minted.turn}.{minted.index}:{role.name}"
        return self._open(Session(name, role.name, role.policy, role.trainable, above.id, parent_call), origin)

    def _role(self, request: ModelRequest, named: str | None) -> Role:
        """The role that the path names, else that of the model's name, else the first whose rules fit."""
        name = named if named is not None else request.model or self._default_role
        role = self.roles.get(name)
        if role is not None:
            return role
        if named is None:
            system = request.messages[0]["content"] if request.messages[0]["role"] == "system" else ""
            for role in self.roles.values():
                if role.fits(request.model, system):
                    return role
        known = ", ".join(sorted(self.roles))
        raise RequestError(f"there is no model {name!r:.80}; models: {known}", status=404, code="model_not_found")

    def look(self, state: SessionState, request: ModelRequest, ask: Ask) -> None:
        """Show a resolved request to whoever watches. Raises `RequestError` (403) when it is refused."""
        if self._observer is not None:
            self._observer.look(request, state.record, self._settled_calls, ask.client)

    def _settled_calls(self) -> Sequence[Call]:
        self.settle()
        return self.calls

    def resolved(self, request: ModelRequest) -> ModelRequest:
        """A request as the conversation that it means. Raises `RequestError`.

        The messages of the answer that it goes on from come first; that request's instructions and tools are not taken
        over. Calls of one turn that stand apart, each before its result, are put together again.
        """
        request = self._rejoined(request)
        if request.previous is None:
            return request
        self.settle()
        node = next((c.node for c in reversed(self.calls) if f"resp_{c.id}" == request.previous), None)
        if node is None:
            raise RequestError(
                f"there is no response {request.previous!r:.80} in this rollout",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        before = [KeyedMessage(self.graph.nodes[at].message) for at in self.graph.path(node)]
        if before[0].get("instructions"):
            before = before[1:]
        elif "tools" in before[0]:
            before[0].pop("tools")
        own = list(request.messages)
        root = own[:1] if own and own[0].get("instructions") else []
        messages = [*root, *before, *own[len(root) :]]
        if request.tools and not root:  # the tools stand on a system message of the conversation before
            checks.with_tools(messages, request.tools, lambda: KeyedMessage(role="system", content=""))
        return replace(request, messages=messages, previous=None, continues=None)

    def _rejoined(self, request: ModelRequest) -> ModelRequest:
        if request.dialect.name != "responses":  # the others say a turn's calls in one message
            return request
        joined: list[KeyedMessage] = []
        last: int | None = None  # the assistant's turn that only results have followed
        for message in request.messages:
            if message["role"] == "assistant":
                if last is not None and self._one_turn(joined[last], message):
                    calls = [*joined[last]["tool_calls"], *message["tool_calls"]]
                    joined[last] = KeyedMessage(joined[last] | {"tool_calls": calls})
                    continue
                last = len(joined)
            elif message["role"] != "tool":
                last = None
            joined.append(message)
        if len(joined) == len(request.messages):
            return request
        return replace(request, messages=joined, continues=None)

    def _one_turn(self, one: KeyedMessage, other: KeyedMessage) -> bool:
        """Whether the second of two messages is but further calls of the first's turn."""
        calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
        if other["content"] or "reasoning" in other or not one.get("tool_calls") or not other.get("tool_calls"):
            return False
        made = [self._minted.get(call["id"]) for call in calls]
        return None not in made and len({(m.state.record.id, m.turn) for m in made if m is not None}) == 1

    def admit(self, state: SessionState, choices: int) -> int:
        """Begin `choices` turns of a session; returns the first's index. Raises `RequestError` (403) at a limit."""
        self.settle()
        limits = self.limits
        if limits.calls is not None and self._admitted + choices > limits.calls:
            raise self.refuse(state, "calls", f"{limits.calls} model calls are used up")
        if limits.critical_steps is not None:
            if state.record.parent is None:  # several sessions at the root share one budget
                left = limits.critical_steps - self._steps.total()
            else:
                left = self._steps.left(state.record.id, limits.critical_steps) or 0
            if left - state.in_flight < choices:
                raise self.refuse(state, "critical_steps", f"{limits.critical_steps} critical steps are used up")
        if self.left_to_sample() == 0:
            raise self.refuse(state, "sampled", f"{self.meter.pace.sampled} sampled tokens are used up")
        turn = state.turns
        state.turns += choices
        state.in_flight += choices
        self._admitted += choices
        return turn

    def left_to_sample(self) -> int | None:
        """How many more tokens the key may sample; None: no limit."""
        most = self.meter.pace.sampled
        return None if most is None else max(0, most - self._sampled)

    def withdraw(self, state: SessionState, leaf: int, serial: int) -> None:
        """A begun turn came to nothing through no fault of the agent: it counts for nothing."""
        self._admitted -= 1
        if state.asked[leaf] == serial + 1:
            state.asked[leaf] = serial

    def forgo(self, state: SessionState, choices: int) -> None:
        """An admitted request is not to be sampled after all."""
        state.in_flight -= choices
        self._admitted -= choices

    def refuse(
        self, state: SessionState, limit: str, what: str, *, status: int = 403, code: str = "budget_exhausted"
    ) -> RequestError:
        """The error for a limit; the first refusal of each session is recorded as a call."""
        self.limit_hit = self.limit_hit or limit
        if not state.refused:
            state.refused = True
            session, turn, now = state.record.id, state.turns, self.clock()
            call = Call(f"{session}#{turn}!", session, turn, None, None, "limit", error=f"{limit}: {what}",
                        started=now, ended=now)  # fmt: skip
            self.commit_now(state, call)
        return RequestError(what, status=status, code=code)

    # ---- seeds and ids ------------------------------------------------------------------------------------------

    def ask(self, state: SessionState, leaf: int, choices: int) -> range:
        """Count a context as asked for `choices` more samples; their serial numbers under it."""
        first = state.asked.get(leaf, 0)
        state.asked[leaf] = first + choices
        return range(first, first + choices)

    def turn_seed(self, state: SessionState, leaf: int, serial: int) -> bytes:
        """The seed of the serial-th sample of a context."""
        return _digest(state.origin, self._context_digest(leaf), b"%d" % serial)

    def mint(self, state: SessionState, turn: int, seed: bytes, index: int) -> str:
        """A tool call id: unique in the rollout, and not to be guessed without its seed."""
        serial = 0
        while True:
            call_id = "call_" + _digest(seed, b"call", b"%d.%d" % (index, serial)).hex()[:24]
            if call_id not in self._minted:
                self._minted[call_id] = Minted(state, turn, seed, index)
                return call_id
            serial += 1

    def _context_digest(self, leaf: int) -> bytes:
        missing: list[int] = []
        at: int | None = leaf
        while at is not None and at not in self._digests:
            missing.append(at)
            at = self.graph.nodes[at].parent
        digest = bytes(16) if at is None else self._digests[at]
        for node in reversed(missing):
            digest = self._digests[node] = _digest(digest, array("q", self.graph.nodes[node].tokens).tobytes())
        return digest

    # ---- recording ----------------------------------------------------------------------------------------------

    async def commit(self, state: SessionState, call: Call, sampled: Node | None) -> None:
        """Make a call durable with all that it stands on, then enter it. Raises `StoreError`, having entered it as
        `ok=False`: then the rollout is incomplete."""
        await self._recorder.record(self._entry(state, call, sampled))

    def commit_now(self, state: SessionState, call: Call, sampled: Node | None = None) -> None:
        """`commit` without awaiting anything, for what must not be interrupted."""
        self._recorder.record_now(self._entry(state, call, sampled))

    def settle(self) -> None:
        """See that no call of this rollout waits for its commit: before its state is read or its graph extended."""
        self._recorder.settle(self)

    def enter(self, entry: Entry) -> None:
        """Take a call in that is durable, or (`entry.fault`) could not be made so."""
        state, call = entry.state, entry.call
        if entry.fault is not None:
            self.complete = False
            self.calls.append(replace(call, node=None, ok=False, error=str(entry.fault)))
            self.faults["store", call.id] = str(entry.fault)
            return
        if not state.stored:
            state.stored = True
            self._recorded.append(state.record)
        self._committed.update([node.id for node in entry.nodes])
        if entry.sampled is not None:
            self.graph.enter(entry.sampled)
        self.calls.append(call)
        self._sampled += call.completion_tokens
        self._steps.add_call(call)
        if not call.ok:
            self.complete = False

    def _entry(self, state: SessionState, call: Call, sampled: Node | None) -> Entry:
        self.settle()
        nodes = [] if sampled is None else [sampled]
        at = call.context
        while at is not None and at not in self._committed:
            nodes.append(self.graph.nodes[at])
            at = nodes[-1].parent
        nodes.reverse()
        return Entry(self, state, call, sampled, nodes)

    def fault(self) -> str | None:
        """The first infrastructure fault that no retry mended."""
        return next(iter(self.faults.values()), None)

    def trace(self) -> Trace:
        """What was recorded so far: the same that the store holds, and the calls that it could not take."""
        nodes = [node for node in self.graph.nodes if node.id in self._committed]
        recorded = list(self._recorded)
        return Trace(self.id, recorded, nodes, list(self.calls), self.complete, self.limit_hit, self.fault())

    def restore(self, sessions: Sequence[Session], nodes: Sequence[Node], calls: Sequence[Call]) -> None:
        """Take up a rollout from its records, under the grant and limits of this one. Raises `StoreError`."""
        try:
            self.graph = MessageGraph.restore((), nodes)
        except ValueError as error:
            raise StoreError(str(error), where=f"rollout {self.id!r}", hint="start the rollout anew") from error
        self._committed = {node.id for node in nodes}
        for session in sessions:
            if session.parent_call is None:
                origin = _digest(self._seed, session.agent.encode())
            else:
                minted = self._minted[session.parent_call]
                origin = _digest(minted.seed, b"%d" % minted.index, session.agent.encode())
            state = self._open(session, origin)
            state.stored = True
            self._recorded.append(session)
            for call in (call for call in calls if call.session == session.id):
                self._restore_call(state, call)
            for key, reply in recorded_replies(session, nodes, calls):
                state.replies.remember(key, reply)
        self.calls = list(calls)
        self._sampled = sum(call.completion_tokens for call in calls)
        self.complete = all(call.ok for call in calls)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _open(self, session: Session, origin: bytes) -> SessionState:
        self.graph.add_session(session)
        self._steps.add_session(session)
        state = self._states[session.parent_call, session.agent] = SessionState(session, origin)
        return state

    def _restore_call(self, state: SessionState, call: Call) -> None:
        if call.finish == "limit":
            state.refused = True
            self.limit_hit = self.limit_hit or (call.error or "").partition(":")[0]
            return
        self._admitted += 1
        state.turns = max(state.turns, call.turn + 1)
        self._steps.add_call(call)
        if call.context is None or call.finish == "error":
            return
        serial = int(call.id.rpartition(".")[2])
        state.asked[call.context] = max(state.asked.get(call.context, 0), serial + 1)
        seed = self.turn_seed(state, call.context, serial)
        for index, tool_call in enumerate(call.tool_calls):
            self._minted[tool_call.id] = Minted(state, call.turn, seed, index)


def _digest(*parts: bytes) -> bytes:
    """A hash of parts: all but the last are digests, numbers or fixed words, so none runs into the next."""
    return blake2b(b"/".join(parts), digest_size=16).digest()


def thinking_id(seed: bytes) -> str:
    """What stands for a turn's thinking where the harness does not see its text; `seed` is the turn's."""
    return "rs_" + _digest(seed, b"thinking").hex()[:24]
