"""Making rollouts by hand: sessions, turns and tool events, as the gateway and the harness would record them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inspan.tasks.base import Task
from inspan.trace.records import Call, Node, Rollout, Session, Terminal, ToolCall, ToolEvent

TASK = Task("t", "a question", "an answer")


@dataclass
class Maker:
    """A rollout in the making. Each turn adds a context message and a sampled one of two tokens."""

    sessions: list[Session] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    events: list[ToolEvent] = field(default_factory=list)
    leaf: dict[str, int | None] = field(default_factory=dict)

    def session(self, parent: str | None = None, call: str | None = None, *, trainable: bool | None = None) -> str:
        id_ = f"s{len(self.sessions)}"
        frozen = parent is not None if trainable is None else not trainable
        role = "main" if parent is None else "subagent"
        self.sessions.append(Session(id_, role, "policy@v0" if frozen else "policy", not frozen, parent, call))
        self.leaf[id_] = None
        return id_

    def node(
        self, session: str, parent: int | None, message: dict[str, Any], tokens: tuple[int, ...], sampled: int
    ) -> int:
        id_ = len(self.nodes)
        start = len(tokens) - sampled
        probs = tuple(-0.25 * (i + 1) for i in range(sampled))
        self.nodes.append(Node(id_, session, parent, message, tokens, start, probs, (len(self.calls),) * sampled))
        return id_

    def turn(self, session: str, *tools: str, content: str = "", finish: str = "", ok: bool | None = True) -> list[str]:
        """One turn that calls `tools` ("!name": an invalid call); returns the calls' ids. `ok`: how the tools went."""
        number = len(self.calls)
        context = self.node(session, self.leaf[session], {"role": "user", "content": f"{number}"}, (1, 2, 3), 0)
        calls = tuple(
            ToolCall(f"c{number}-{i}", name.lstrip("!"), f'{{"q": "{number}-{i}"}}', "bad" if name[0] == "!" else None)
            for i, name in enumerate(tools)
        )
        sampled = self.node(session, context, {"role": "assistant", "content": content}, (9, number, number + 1), 2)
        self.leaf[session] = sampled
        finish = finish or ("tool_calls" if tools else "stop")
        turn = sum(call.session == session for call in self.calls)
        self.calls.append(Call(f"call{number}", session, turn, context, sampled, finish, calls, 3, 2))
        if ok is not None:
            self.events += [ToolEvent(session, c.id, c.name, ok and c.error is None, 0.5) for c in calls]
        return [call.id for call in calls]

    def worker(self, parent: str, call: str, turns: int = 2, **options: Any) -> str:
        """A sub-agent that works for `turns` turns and ends well."""
        child = self.session(parent, call)
        for _ in range(turns - 1):
            self.turn(child, "search", **options)
        self.turn(child, content="found")
        return child

    def rollout(self, answer: str | None = "an answer", task: Task = TASK, **options: Any) -> Rollout:
        terminal = options.pop("terminal", Terminal.COMPLETED)
        values = {"id": "r", "group": "g", "member": 0} | options
        return Rollout(
            task=task,
            terminal=terminal,
            answer=answer,
            sessions=self.sessions,
            nodes=self.nodes,
            calls=self.calls,
            tool_events=self.events,
            **values,
        )


def solo(turns: int = 2, **options: Any) -> Rollout:
    """One agent that searches, then answers."""
    make = Maker()
    main = make.session()
    for _ in range(turns - 1):
        make.turn(main, "search")
    make.turn(main, content="an answer")
    return make.rollout(**options)


def swarm(stages: list[int], *, turns: int = 2, **options: Any) -> Rollout:
    """An orchestrator that assigns so many sub-tasks a turn, then answers."""
    make = Maker()
    main = make.session()
    for size in stages:
        for call in make.turn(main, *["assign_task"] * size, ok=None):
            make.worker(main, call, turns)
    make.turn(main, content="an answer")
    return make.rollout(**options)
