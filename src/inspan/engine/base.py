"""The engine's contract: token ids in; token ids, log-probabilities and policy versions out.

An engine knows no messages and no HTTP. Several policies live in one engine; each has a version that only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from inspan.trace.records import Tokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `temperature` 0 is greedy. `stop_ids` end the sample and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What was sampled. The three lists have equal length; log-probs are natural, of the sampling distribution."""

    tokens: Tokens
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop: str  # "stop" (a stop id, or the watcher said so) | "length" (max_tokens or context) | "cancelled"
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # per token: (id, logprob) pairs, when top_logprobs > 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Weights to load: a version, and either a directory of safetensors or tensors in memory (name → tensor)."""

    version: int
    path: str | None = None
    tensors: dict[str, object] | None = None


Watch = Callable[[Sequence[int]], bool]
"""Called after each decode step with the ids sampled since the last call; True stops the request."""


class Engine(Protocol):
    """Where tokens come from."""

    @property
    def context_length(self) -> int:
        """The most tokens (prompt + completion) a request may have."""
        ...

    async def sample(self, policy: str, prompt: Tokens, params: SamplingParams, watch: Watch | None = None) -> Sample:
        """Sample one continuation of `prompt`. Cancelling the awaiting task cancels the request.

        Raises `EngineOverloaded` when the queue is full, `EngineError` on an engine fault, `RequestError` when the
        prompt does not fit the context.
        """
        ...

    async def load(self, policy: str, weights: WeightsRef) -> None:
        """Swap in weights from a private copy between two decode steps; running requests keep their KV."""
        ...

    def version(self, policy: str) -> int:
        """The version of a policy that the next token would be sampled at."""
        ...

    async def close(self) -> None:
        """Cancel what runs and free the memory."""
        ...
