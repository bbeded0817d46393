"""The records that travel between the rooms. Contract: plain data, no behaviour that needs a model or a network.

A *session* is one agent's conversation; sessions form a tree. Inside a session, messages form a graph: a *node* is one
message with its parent and the *token delta* that it adds. A *chain* is a path from a root to a leaf, as the learner
trains it. A *rollout* is everything one agent (with its sub-agents) did on one task, in exactly one terminal state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Tokens = tuple[int, ...]
Message = Mapping[str, Any]
"""A message in the internal form: `role` (system, user, assistant, tool), `content` (str), and, where they apply,
`tool_calls` (`[{"id", "name", "arguments"}]`, `arguments` being the raw JSON text the model wrote), `tool_call_id`,
`name`, `tools` (on the root message only: the tool schemas rendered with the system prompt)."""


class Terminal(StrEnum):
    """How a rollout ended. Each dispatched rollout reaches exactly one of these, once."""

    COMPLETED = "completed"  # the harness returned an answer
    FAILED = "failed"  # the harness raised after the model had sampled: scored as a failure
    TIMED_OUT = "timed_out"  # the harness ran past its time after the model had sampled: scored as a failure
    LIMIT = "limit"  # the gateway's hard stop ended it: scored on what it has
    INFRASTRUCTURE = "infrastructure"  # engine, gateway or sandbox failed, or nothing was ever sampled: no reward
    CANCELLED = "cancelled"  # dropped by the dispatcher (staleness, shutdown): no reward

    @property
    def scored(self) -> bool:
        """Whether a rollout that ended so has a reward at all."""
        return self not in (Terminal.INFRASTRUCTURE, Terminal.CANCELLED)


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's conversation. `parent_call` is the tool call (of the parent session) that it answers."""

    id: str
    agent: str  # role: "orchestrator", "subagent", "main", "judge"...
    policy: str  # "policy" (the trained one), "policy@v0" (frozen), or an outside model's name
    trainable: bool
    parent: str | None = None
    parent_call: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One message: its parent and the token delta it adds.

    `tokens[start:]` were sampled by the engine, with `logprobs` and `versions` of the same length;
    `tokens[:start]` is context (for an assistant turn: what closes the turn before, and the generation prompt).
    A node that nobody sampled has `start == len(tokens)`. `fork` says why the node is not a continuation.
    """

    id: int  # unique in the rollout, ascending in order of creation; parents are smaller than children
    session: str
    parent: int | None
    message: Message
    tokens: Tokens
    start: int
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    fork: str | None = None

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled (part of) this node."""
        return self.start < len(self.tokens)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it. `error` is None when it parses and fits the tool's schema."""

    id: str
    name: str
    arguments: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: context leaf in, sampled node out. `ok` is False when its capture failed."""

    id: str
    session: str
    turn: int  # 0-based, in order of arrival within the session
    context: int | None  # node id of the last context message
    node: int | None  # node id of the sampled message; None when nothing was sampled
    finish: str  # "stop" | "tool_calls" | "length" | "limit" | "error" | "cancelled"
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ok: bool = True
    error: str | None = None
    started: float = field(default=0.0, compare=False)  # Unix time in seconds; 0.0 where it was not recorded
    ended: float = field(default=0.0, compare=False)
    ask: str = field(
        default="", compare=False
    )  # names the request: a marked retry gets its answer, after a restart too


@dataclass(frozen=True, slots=True)
class ToolEvent:
    """One execution of a tool by the harness. `latency_s` is declared by the tool, not measured on a busy machine."""

    session: str
    call: str  # the tool call's id
    name: str
    ok: bool
    latency_s: float = 0.0
    detail: str = ""  # the error, when not ok
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chain:
    """A path from root to leaf, as the learner sees it. All lists have the length of `tokens`.

    `trained[i]` marks tokens to train: sampled by a trainable agent and not already trained in an earlier chain.
    `logprobs` and `versions` hold 0.0 and -1 where nothing was sampled. `turns[i]` is the index of the call (in the
    rollout) that sampled token i, or -1.
    """

    session: str
    agent: str
    policy: str
    tokens: Tokens
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    turns: tuple[int, ...]
    nodes: tuple[int, ...]  # node ids from root to leaf


@dataclass(slots=True)
class Rollout:
    """What one agent and its sub-agents did on one task. `complete` is False when any call's capture failed."""

    id: str
    task: Any  # inspan.tasks.base.Task; Any keeps the trace free of the tasks' room
    group: str
    member: int
    terminal: Terminal
    answer: str | None
    sessions: list[Session]
    nodes: list[Node]
    calls: list[Call]
    tool_events: list[ToolEvent] = field(default_factory=list)
    attempt: int = 0
    complete: bool = True
    error: str | None = None
    fingerprint: str = ""
    version_started: int = 0
    version_finished: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        """Whether the learner may see it: terminal state scored and every call captured."""
        return self.terminal.scored and self.complete


@dataclass(slots=True)
class Scored:
    """A rollout with its reward. `reward` is None for an infrastructure failure: not 0, and in no baseline."""

    rollout: Rollout
    reward: float | None
    terms: dict[str, float | None] = field(default_factory=dict)
    turn_rewards: dict[int, float] = field(default_factory=dict)  # call index in the rollout → per-turn term


@dataclass(slots=True)
class ChainCredit:
    """A chain with per-token advantages and weights: all that the learner sees of a rollout.

    `rollout` (an index) tells chains of one rollout apart for sequence-level objectives and rollout-level means.
    """

    chain: Chain
    advantages: tuple[float, ...]  # length of chain.tokens; 0.0 where not trained
    weights: tuple[float, ...]  # length of chain.tokens; 0.0 where not trained
    rollout: int
    group: int
