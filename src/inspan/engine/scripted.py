"""An engine that plays a script: for tests and benchmarks. Contract: `engine.base.Engine`; no model, no clock.

A script is a list of replies (played in order of the requests) or a function of (policy, prompt). Failures and delays
are injected: a reply may be an exception, and `hold` makes a request wait for an event of the test's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from inspan.engine.base import Sample, SamplingParams, Watch, WeightsRef
from inspan.errors import EngineError, RequestError
from inspan.trace.records import Tokens

Reply = Sequence[int] | Exception
"""Token ids to answer with, or an exception to raise."""
Script = Callable[[str, Tokens], Reply] | Iterable[Reply]
"""Replies by (policy, prompt), or in order of arrival."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A request as the engine got it."""

    policy: str
    prompt: Tokens
    params: SamplingParams


class ScriptedEngine:
    """Answers from `script`, with log-prob `logprob` for each token and the policy's present version.

    `heard` lists the requests in order of arrival. `hold`, when given, is awaited before an answer. `max_tokens`, the
    context and the watcher cut a reply as they would a sampled one.
    """

    def __init__(
        self,
        script: Script,
        *,
        context_length: int = 4096,
        logprob: float = -0.5,
        hold: Callable[[Heard], asyncio.Event | None] | None = None,
    ) -> None:
        self._call = script if callable(script) else None
        self._replies: Iterator[Reply] = iter(()) if callable(script) else iter(script)
        self._context, self._logprob, self._hold = context_length, logprob, hold
        self._versions: dict[str, int] = {}
        self._closed = False
        self.heard: list[Heard] = []
        self.loaded: list[tuple[str, WeightsRef]] = []

    @property
    def context_length(self) -> int:
        """The most tokens (prompt + completion) a request may have."""
        return self._context

    async def sample(self, policy: str, prompt: Tokens, params: SamplingParams, watch: Watch | None = None) -> Sample:
        """The next reply of the script, token by token as far as the watcher is concerned."""
        if self._closed:
            raise EngineError("the engine is closed", where=policy)
        if len(prompt) >= self._context:
            what = f"the prompt has {len(prompt)} tokens; the context is {self._context}"
            raise RequestError(what, param="prompt", code="context_length_exceeded")
        heard = Heard(policy, tuple(prompt), params)
        self.heard.append(heard)
        reply = self._next(heard)
        event = self._hold(heard) if self._hold is not None else None
        if event is not None:
            await event.wait()
        else:
            await asyncio.sleep(0)
        if isinstance(reply, Exception):
            raise reply
        return self._play(policy, reply, params, watch, self._context - len(prompt))

    def _next(self, heard: Heard) -> Reply:
        if self._call is not None:
            return self._call(heard.policy, heard.prompt)
        try:
            return next(self._replies)
        except StopIteration:
            raise EngineError(f"the script has no reply for request {len(self.heard)}", where=heard.policy) from None

    def _play(
        self, policy: str, reply: Sequence[int], params: SamplingParams, watch: Watch | None, room: int
    ) -> Sample:
        tokens: list[int] = []
        stop = "length"
        for token in reply[: min(params.max_tokens, room)]:
            tokens.append(int(token))
            if (watch is not None and watch([int(token)])) or token in params.stop_ids:
                stop = "stop"
                break
        else:
            if len(tokens) == len(reply) and not params.stop_ids:
                stop = "stop"
        count = len(tokens)
        top = tuple(((t, self._logprob),) for t in tokens) if params.top_logprobs else ()
        return Sample(tuple(tokens), (self._logprob,) * count, (self.version(policy),) * count, stop, top)

    async def load(self, policy: str, weights: WeightsRef) -> None:
        """Note the new version."""
        self.loaded.append((policy, weights))
        self._versions[policy] = weights.version

    def version(self, policy: str) -> int:
        """The version last loaded, 0 at first."""
        return self._versions.get(policy, 0)

    async def close(self) -> None:
        """Refuse what comes later."""
        self._closed = True
