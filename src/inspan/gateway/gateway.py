"""The gateway: where every harness meets the model, and where all that passes is recorded.

Contract: `open` lets a rollout in and hands out its key; `seal` lets nothing more in and returns what was recorded.
`app` is the ASGI application that harnesses call, over a socket or in-process.

Invariants
- A call is committed before its last byte reaches the harness.
- Only a request that is marked as a retry (`x-stainless-retry-count` above 0, or an idempotency key) shares the answer
  of the request that it repeats; an identical one that is not marked is sampled afresh.
- A fault of engine or store answers 429 or 503 and marks the trace, unless a retry of the same request mends it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final

from inspan.engine.base import Engine, SamplingParams
from inspan.errors import InputError, RequestError, StoreError
from inspan.gateway.app import App
from inspan.gateway.base import Grant, Limits, OutsideChat, Role, Trace
from inspan.gateway.exchange import Exchange, check_room, sealed
from inspan.gateway.grants import Terms, key_hash, new_key
from inspan.gateway.live import LiveRollout, SessionState
from inspan.gateway.outside import OutsideExchange
from inspan.gateway.pace import Pace
from inspan.gateway.recorder import Recorder
from inspan.gateway.renderers import AnyRenderer, scribe_for
from inspan.gateway.reply import Reply
from inspan.gateway.request import ModelRequest
from inspan.gateway.retries import Ask
from inspan.gateway.scribe import LARGE, Scribe
from inspan.gateway.streaming import KEEP_ALIVE_S, stream_exchange, stream_reply
from inspan.parity.watch import Watch
from inspan.trace.store import TraceStore

MAX_BODY: Final = 64 * 1024 * 1024
_SEALED: Final = 65536  # keys remembered after sealing, to answer late calls


class Gateway:
    """Serves policies to rollouts. `engines` and `renderers` override by policy; `outside` passes policies through.

    `watch` looks at what every rollout shows the model.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: AnyRenderer,
        *,
        store: TraceStore | None = None,
        engines: Mapping[str, Engine] | None = None,
        renderers: Mapping[str, AnyRenderer] | None = None,
        outside: Mapping[str, OutsideChat] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        durable: bool = False,
        watch: Watch | None = None,
        max_body: int = MAX_BODY,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.max_body = max_body
        self.keep_alive_s = keep_alive_s
        self.clock, self.monotonic = clock, monotonic
        self._engine, self._engines = engine, dict(engines or {})
        self._scribe: Scribe = scribe_for(renderer)
        self._scribes: dict[str, Scribe] = {policy: scribe_for(r) for policy, r in (renderers or {}).items()}
        self._outside = dict(outside or {})
        self._store = store
        self._durable = durable
        self.watch = watch
        self._recorder = Recorder(store)
        self._live: dict[str, LiveRollout] = {}
        self._keys: dict[bytes, LiveRollout | None] = {}
        self._sealed: deque[bytes] = deque()
        self.app: Callable[..., Awaitable[None]] = App(self)

    # ---- for the dispatcher -------------------------------------------------------------------------------------

    def open(
        self,
        rollout: str,
        *,
        roles: Sequence[Role],
        limits: Limits | None = None,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        default_role: str | None = None,
        pace: Pace | None = None,
        watch: Watch | None = None,
    ) -> Grant:
        """Let a rollout in. `sampling` rules trainable sessions; without it, requests do. `watch` looks at what it
        shows the model, in place of the gateway's own. Raises `InputError`, and `StoreError` where a durable gateway
        knows the rollout already."""
        terms = Terms(
            roles, limits or Limits(), seed, sampling, default_role or next((r.name for r in roles), ""), pace or Pace()
        )
        self._check(rollout, terms)
        key = new_key()
        if self._durable and self._store is not None:
            self._store.put_grant(rollout, key_hash(key), terms.to_json())
        return self._enter(Grant(rollout, key, f"/r/{key}/v1"), terms, watch).grant

    def _check(self, rollout: str, terms: Terms) -> None:
        """Raise `InputError` for terms that cannot be granted."""
        roles, default = terms.roles, terms.default_role
        if rollout in self._live:
            raise InputError(f"rollout {rollout!r} is open already", hint="give each rollout an id of its own")
        names = [role.name for role in roles]
        if default not in names or len(set(names)) < len(names):
            raise InputError(
                f"the roles are {names}, the default is {default!r}", where=f"rollout {rollout!r}",
                hint="give roles of different names, and one of them as the default",
            )  # fmt: skip
        for role in roles:
            if role.trainable and role.policy in self._outside:
                raise InputError(f"role {role.name!r} is trainable, but {role.policy!r} is an outside model",
                                 where=f"rollout {rollout!r}", hint="train a policy of the engine")  # fmt: skip

    def _enter(self, grant: Grant, terms: Terms, watch: Watch | None = None) -> LiveRollout:
        live = LiveRollout(
            grant,
            roles=terms.roles,
            limits=terms.limits,
            seed=terms.seed,
            sampling=terms.sampling,
            default_role=terms.default_role,
            recorder=self._recorder,
            pace=terms.pace,
            watch=watch or self.watch,
            clock=self.clock,
        )
        self._live[grant.rollout] = live
        self._keys[key_hash(grant.key)] = live
        return live

    def resume(
        self,
        rollout: str,
        *,
        roles: Sequence[Role],
        limits: Limits | None = None,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        default_role: str | None = None,
    ) -> Grant:
        """Take up a rollout from the store, under a new key; the harness goes on where its last recorded call ended.

        Raises `StoreError` when the store does not know it, `InputError` without a store.
        """
        if self._store is None:
            raise InputError("there is no store to resume from", where=f"rollout {rollout!r}", hint="give one")
        stored = self._store.load(rollout)
        grant = self.open(rollout, roles=roles, limits=limits, seed=seed, sampling=sampling, default_role=default_role)
        try:
            self._live[rollout].restore(*stored)
        except BaseException:
            self._forget(self._live.pop(rollout))
            raise
        return grant

    def seal(self, rollout: str) -> Trace:
        """Let nothing more in and return what was recorded; calls in flight are cancelled. Raises `InputError`."""
        live = self._live.pop(rollout, None)
        if live is None:
            raise InputError(f"rollout {rollout!r} is not open", hint="open it first; seal it once")
        self._forget(live)
        if self._durable and self._store is not None:
            self._store.seal_grant(rollout)
        return live.trace()

    async def close(self) -> None:
        """Cancel what runs and refuse all keys, which a durable gateway's successor takes up again. The engines and the
        store are the caller's to close."""
        for live in list(self._live.values()):
            self._forget(live)
        self._live.clear()
        await asyncio.sleep(0)

    # ---- for the application ------------------------------------------------------------------------------------

    def authorise(self, key: str | None) -> LiveRollout:
        """The rollout of a key. Raises `RequestError`: 401 for no or an unknown key, 403 after sealing."""
        if not key:
            raise RequestError("there is no API key; send it as a bearer token", status=401, code="invalid_api_key")
        digest = key_hash(key)
        live = self._keys.get(digest)
        if live is not None:
            return live
        if digest in self._keys:
            raise sealed()
        live = self._restored(key, digest)
        if live is not None:
            return live
        raise RequestError("the API key is unknown", status=401, code="invalid_api_key")

    async def reply(self, live: LiveRollout, request: ModelRequest, ask: Ask) -> Reply:
        """Serve a request that is not streamed."""
        state = live.session(request, ask)
        shared = await state.replies.shared(ask)
        if shared is not None:
            return shared
        answer = state.replies.begin(ask)
        try:
            if state.record.policy in self._outside:
                reply = await self._ask_outside(live, state, request, ask)
            else:
                exchange = await self._exchange(live, state, request, ask)
                reply = exchange.reply(await exchange.choices(), int(self.clock()))
            answer.set_result(reply)
            return reply
        finally:
            answer.cancel()

    async def stream(self, live: LiveRollout, request: ModelRequest, ask: Ask) -> AsyncGenerator[bytes, None]:
        """Serve a request as server-sent events. What is raised before the first piece has a status of its own."""
        state = live.session(request, ask)
        shared = await state.replies.shared(ask)
        if shared is not None:
            yield stream_reply(shared, request)
            return
        answer = state.replies.begin(ask)
        try:
            if state.record.policy in self._outside:
                reply = await self._ask_outside(live, state, request, ask)
                answer.set_result(reply)
                yield stream_reply(reply, request)
                return
            exchange = await self._exchange(live, state, request, ask)
            async with aclosing(stream_exchange(exchange, int(self.clock()), answer, self.keep_alive_s)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            answer.cancel()

    async def count(self, live: LiveRollout, request: ModelRequest, ask: Ask) -> int:
        """How many tokens a request's prompt has; nothing is recorded."""
        state = live.session(request, ask)
        scribe = self._scribes.get(state.record.policy, self._scribe)
        live.settle()
        return len(state.lay(scribe, live.graph, live.resolved(request)).prompt)

    def models(self, live: LiveRollout) -> list[str]:
        """The models that a key may call."""
        return list(live.roles)

    def known(self, rollout: str) -> LiveRollout | None:
        """An open rollout by its id; None when it is not open here (it may wait for its key in the store)."""
        return self._live.get(rollout)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _restored(self, key: str, digest: bytes) -> LiveRollout | None:
        """The rollout of a key that was granted before this gateway started. Raises `RequestError` if it is sealed."""
        row = self._store.grant(digest) if self._durable and self._store is not None else None
        if row is None or self._store is None:
            return None
        if row.sealed:
            raise sealed()
        live = self._enter(Grant(row.rollout, key, f"/r/{key}/v1"), Terms.from_json(row.terms))
        try:
            live.restore(*self._store.load(row.rollout))
        except BaseException:
            del self._live[row.rollout], self._keys[digest]
            raise
        return live

    async def _ask_outside(self, live: LiveRollout, state: SessionState, request: ModelRequest, ask: Ask) -> Reply:
        policy = state.record.policy
        scribe = self._scribes.get(policy, self._scribe)
        request = live.resolved(request)
        live.look(state, request, ask)
        exchange = OutsideExchange(live, state, request, scribe, (state.record.id, ask.body))
        return await exchange.reply(self._outside[policy], int(self.clock()))

    async def _exchange(self, live: LiveRollout, state: SessionState, request: ModelRequest, ask: Ask) -> Exchange:
        policy = state.record.policy
        scribe = self._scribes.get(policy, self._scribe)
        live.latest[ask.parent_call] = request
        request = live.resolved(request)
        live.look(state, request, ask)
        engine = self._engines.get(policy, self._engine)
        characters = sum(len(message["content"]) for message in request.messages)
        if characters > LARGE:
            check_room(live, state, engine, scribe.renderer.fewest_tokens(characters), "at least ")
            await scribe.prepare(live.graph, state.record.id, request.messages)
            if live.sealed:
                raise sealed()
        return Exchange(live, state, request, scribe, engine, ask)

    def _forget(self, live: LiveRollout) -> None:
        """Seal: record what is in flight as cancelled, and keep the key only to answer late calls."""
        live.settle()
        for flight in list(live.flights):
            with suppress(StoreError):  # commit has marked the rollout incomplete
                live.commit_now(flight.state, flight.ended("cancelled"))
            flight.call_off()
        live.sealed = True
        digest = key_hash(live.grant.key)
        self._keys[digest] = None
        self._sealed.append(digest)
        if len(self._sealed) > _SEALED:
            del self._keys[self._sealed.popleft()]
