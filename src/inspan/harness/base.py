"""The harness's contract: an agent as it ships. It gets a task and a context, and knows nothing of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from inspan.tasks.base import Task
from inspan.trace.records import ToolEvent

PARENT_CALL_HEADER = "X-Parent-Call"
"""Carries the tool call id on whose behalf a sub-agent's model call is made; an ordinary server ignores it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible endpoint. `http_client` is an `httpx2.AsyncClient` wired in-process, or None for sockets."""

    base_url: str
    api_key: str
    name: str  # what to send as `model`
    http_client: Any = None


class Toolbox(Protocol):
    """The environment's tools, as the harness offers them to the model."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str, session: str = "") -> str:
        """Run a tool. Errors come back as text that begins with "error:"; the event is recorded either way."""
        ...


@dataclass(slots=True)
class Context:
    """What a harness may use: model endpoints by role, the environment's tools, its budget, a working directory.

    `events` collects what the tools did; `budget` is the episode's critical-step limit (None: no limit).
    """

    endpoints: Mapping[str, Endpoint]
    tools: Toolbox | None = None
    budget: int | None = None
    workspace: str | None = None
    max_tokens: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    events: list[ToolEvent] = field(default_factory=list)

    def model(self, role: str = "main") -> Endpoint:
        """The endpoint of a role; raises KeyError naming the known roles when there is none."""
        try:
            return self.endpoints[role]
        except KeyError:
            raise KeyError(f"no model for role {role!r}; known roles: {sorted(self.endpoints)}") from None


class Harness(Protocol):
    """An agent. `run` returns the answer as text; raising or hanging is scored as a failure once it has sampled."""

    async def run(self, task: Task, ctx: Context) -> str:
        """Work on one task."""
        ...
