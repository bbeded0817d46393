"""What the gateway promises to those who open it: roles, limits, a grant, and the trace that sealing returns.

A *role* is what a harness sends as `model`; it maps to a policy. A *grant* is the right of one rollout to call the
models of its roles, under its limits, with an unguessable key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from inspan.errors import InputError
from inspan.trace.records import Call, Node, Session


@dataclass(frozen=True, slots=True)
class Role:
    """An agent's place in the harness: `name` is what the harness sends as `model`.

    For programs that send other names, a role may have rules: requests whose model name matches `model` in full, and in
    whose system message `system` is found, are its own. A role without rules is only called by its name.
    """

    name: str
    policy: str
    trainable: bool
    model: re.Pattern[str] | None = None
    system: re.Pattern[str] | None = None

    def fits(self, model: str, system: str) -> bool:
        """Whether the rules take a request."""
        if self.model is None and self.system is None:
            return False
        if self.model is not None and self.model.fullmatch(model) is None:
            return False
        return self.system is None or self.system.search(system) is not None


@dataclass(frozen=True, slots=True)
class Limits:
    """The hard stop of a rollout; None: no limit.

    `critical_steps` bounds the tree of sessions (recipes: critical steps, waves of `width` children), `calls` the model
    calls of all sessions, `tokens` the context (prompt + completion) of any one call.
    """

    critical_steps: int | None = None
    tokens: int | None = None
    calls: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("critical_steps", "tokens", "calls", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"the limit {name} is {value}", hint="give a number from 1, or None for no limit")


@dataclass(frozen=True, slots=True)
class Grant:
    """The right of one rollout to call its models: send `key` as API key, or use `base_path` as the base URL's path."""

    rollout: str
    key: str
    base_path: str  # "/r/<key>/v1"

    def __repr__(self) -> str:  # the key does not end up in logs
        return f"Grant(rollout={self.rollout!r})"


@dataclass(frozen=True, slots=True)
class Trace:
    """What the gateway recorded of a rollout.

    `complete` is False when the capture of any call failed. `limit_hit` names the limit that refused a call ("critical
    steps", "calls", "tokens"). `fault` is the infrastructure error that no retry mended, if there was one.
    """

    rollout: str
    sessions: list[Session]
    nodes: list[Node]
    calls: list[Call]
    complete: bool = True
    limit_hit: str | None = None
    fault: str | None = None

    @property
    def sampled(self) -> bool:
        """Whether the model sampled at least one token."""
        return any(node.sampled for node in self.nodes)


class OutsideChat(Protocol):
    """An outside model, asked in its own dialect."""

    async def chat(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a Chat Completions body, get the response body; raises `EngineError`."""
        ...
