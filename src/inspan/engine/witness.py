"""An engine that remembers what it served, for whom. Contract: answers are the engine's own; nothing else differs.

The record of a rollout is checked against this (`--verify`), so it must not come the same way: it stands between
gateway and engine, and knows of a rollout only its name, in `CALLER`.
"""

from __future__ import annotations

from collections import defaultdict
from contextvars import ContextVar

from inspan.engine.base import Engine, Sample, SamplingParams, Watch, WeightsRef
from inspan.trace.records import Tokens
from inspan.trace.verify import Witnessed

CALLER: ContextVar[str] = ContextVar("the rollout that an engine works for", default="")


class WitnessEngine:
    """Wraps an engine; `take` gives what it served for a caller, and forgets it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._served: dict[str, list[Witnessed]] = defaultdict(list)

    @property
    def context_length(self) -> int:
        """The engine's."""
        return self.engine.context_length

    async def sample(self, policy: str, prompt: Tokens, params: SamplingParams, watch: Watch | None = None) -> Sample:
        """The engine's answer. One that was cancelled, or has no token, is no sample."""
        caller = CALLER.get()
        sample = await self.engine.sample(policy, prompt, params, watch)
        if sample.tokens and sample.stop != "cancelled":
            seen = Witnessed(
                policy, tuple(prompt), tuple(sample.tokens), tuple(sample.logprobs), tuple(sample.versions)
            )
            self._served[caller].append(seen)
        return sample

    def take(self, caller: str) -> list[Witnessed]:
        """What was served for a caller since the last time."""
        return self._served.pop(caller, [])

    async def load(self, policy: str, weights: WeightsRef) -> None:
        """The engine's."""
        await self.engine.load(policy, weights)

    def version(self, policy: str) -> int:
        """The engine's."""
        return self.engine.version(policy)

    async def close(self) -> None:
        """The engine's."""
        await self.engine.close()
