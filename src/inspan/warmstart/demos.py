"""Demonstrations: what a scripted expert does in the real environment, as conversations ready to be rendered.

Contract: the environment's own tools, prompts and schemas are used, so a demonstration looks exactly like a rollout.
`Habits` sets how faulty and how parallel the expert is; the defaults are clean. Reinforcement learning is to discover
what the faulty habits miss: to look everything up, and to spread wide work over sub-agents.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

from inspan.harness.loop import ANSWER_NOW
from inspan.harness.single import SYSTEM
from inspan.harness.swarm import ASSIGN, CREATE
from inspan.harness.tools import READ, SEARCH, Library, LibraryTools
from inspan.retrieval.corpus import Document
from inspan.tasks.base import Task
from inspan.tasks.facts.questions import item, prompt
from inspan.tasks.facts.world import World

SUBAGENT = "scout"
SUBAGENT_SYSTEM = "You look up facts."


@dataclass(frozen=True, slots=True)
class Habits:
    """How the expert behaves: rates per episode (premature, spawn), per look-up (miss) and per tool run (fault)."""

    premature: float = 0.0  # stops after some of the look-ups
    miss: float = 0.0  # leaves one look-up out
    spawn: float = 0.0  # delegates, where it may
    partial: float = 0.3  # of those that delegate: hands out only some of the work
    serial: float = 0.2  # of those that delegate: one assignment a turn
    needless: float = 0.0  # of those that delegate: hands some of the work out again
    fault: float = 0.03  # a tool run fails (and is tried again, mostly)
    budget: float = 0.2  # the episode is cut by its budget


@dataclass(slots=True)
class Conversation:
    """Messages with the tools on offer. Every assistant message is to be learnt."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def call(self, *calls: tuple[str, dict[str, str]]) -> None:
        """The assistant calls tools."""
        made = [{"id": "", "name": n, "arguments": json.dumps(a, ensure_ascii=False)} for n, a in calls]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": made})

    def say(self, role: str, content: str) -> None:
        """A message of text."""
        self.messages.append({"role": role, "content": content})

    @property
    def turns(self) -> int:
        """Assistant turns so far."""
        return sum(message["role"] == "assistant" for message in self.messages)


@dataclass(slots=True)
class Expert:
    """The scripted expert in one world."""

    world: World
    rng: random.Random
    habits: Habits
    tools: LibraryTools = field(init=False)

    def __post_init__(self) -> None:
        documents = [Document(p.ref, p.text, p.listed) for p in self.world.pages.values()]
        self.tools = LibraryTools(Library.of(documents))

    def alone(self, task: Task, *, system: str = SYSTEM, delegating: bool = False, first: int = 1) -> Conversation:
        """Work through the look-ups one by one, as a single agent, a sub-agent, or an orchestrator that does not
        delegate. Items are numbered from `first`."""
        meta = task.meta
        text = prompt(self.world, meta["names"], meta["attributes"], meta.get("link"), first=first)
        talk = self._start(text, system, delegating)
        goals = self._goals(task, first)
        stop = self.rng.randint(1, max(1, len(goals) - 1)) if self._chance(self.habits.premature) else len(goals)
        cut = self.rng.randint(3, 16) if self._chance(self.habits.budget) else 10**6
        rows: list[str] = []
        for number, name, attribute, link in goals[:stop]:
            if len(goals) > 1 and self._chance(self.habits.miss):
                continue
            if not self._look_up(talk, number, name, attribute, link, rows, cut):
                break
        talk.say("assistant", "\n".join(rows) or "unknown")
        return talk

    def delegate(self, task: Task) -> Conversation:
        """Hand the look-ups of each entity to a sub-agent, then put the answers together."""
        talk = self._start(task.prompt, SYSTEM, True)
        names = list(task.meta["names"])
        if len(names) > 1 and self._chance(self.habits.partial):
            names = names[: self.rng.randint(1, len(names) - 1)]
        if self.habits.needless and self._chance(self.habits.needless):
            names += self.rng.choices(names, k=self.rng.randint(1, 3))
        attributes, link = task.meta["attributes"], task.meta.get("link")
        place = task.meta["names"].index
        prompts = [prompt(self.world, [n], attributes, link, first=place(n) + 1) for n in names]
        create = ("create_subagent", {"name": SUBAGENT, "system_prompt": SUBAGENT_SYSTEM})
        assigns = [("assign_task", {"agent": SUBAGENT, "prompt": text}) for text in prompts]
        answers = [self._delegated(task, name) for name in names]
        step = 1 if self._chance(self.habits.serial) else len(names)
        for at in range(0, len(names), step):
            first = [create] if at == 0 else []
            talk.call(*first, *assigns[at : at + step])
            for _ in first:
                talk.say("tool", f"created {SUBAGENT}")
            for answer in answers[at : at + step]:
                talk.say("tool", answer)
        found = [a for a in answers if not a.startswith("error:") and a != "unknown"]
        talk.say("assistant", "\n".join(dict.fromkeys(found)) or "unknown")
        return talk

    def _delegated(self, task: Task, name: str) -> str:
        if self._chance(0.06):
            return self.rng.choice(("error: the sub-agent ran out of steps", "unknown"))
        at = task.meta["names"].index(name)
        target = task.meta.get("targets", task.meta["names"])[at]
        found = [self._row(at + 1, target, a) for a in task.meta["attributes"]]
        return "\n".join(found[:1] if len(found) > 1 and self._chance(0.08) else found)

    def _row(self, number: int, name: str, attribute: str) -> str:
        return f"{item(number, name)} | {self.world.label(attribute)} | {self.world.value(name, attribute)}"

    def _start(self, text: str, system: str, delegating: bool) -> Conversation:
        talk = Conversation([SEARCH, READ, *((CREATE, ASSIGN) if delegating else ())])
        talk.say("system", system)
        talk.say("user", text)
        return talk

    def _goals(self, task: Task, first: int) -> list[tuple[int, str, str, str | None]]:
        link = task.meta.get("link")
        numbered = list(enumerate(task.meta["names"], first))
        return [(number, name, attribute, link) for number, name in numbered for attribute in task.meta["attributes"]]

    def _look_up(
        self, talk: Conversation, number: int, name: str, attribute: str, link: str | None, rows: list[str], cut: int
    ) -> bool:
        """Search and read one fact (over its link, if any). False when the budget ended the episode."""
        if link:
            if not self._fetch(talk, number, name, link, cut):
                return False
            name = self.world.value(name, link)
        if not self._fetch(talk, number, name, attribute, cut):
            return False
        rows.append(self._row(number, name, attribute))
        return True

    def _fetch(self, talk: Conversation, number: int, name: str, attribute: str, cut: int) -> bool:
        ref = self.world.refs[name, attribute]
        query = f"{item(number, name)} {self.world.label(attribute)}"  # the number keeps the place in the list
        if not self._use(talk, "search", {"query": query}, cut):
            return False
        if not self._use(talk, "read", {"page": ref}, cut):
            return False
        text = self.world.pages[ref].text
        if "continued: " in text:
            return self._use(talk, "read", {"page": text.rsplit("continued: ", 1)[1]}, cut)
        return True

    def _use(self, talk: Conversation, name: str, arguments: dict[str, str], cut: int) -> bool:
        while True:
            talk.call((name, arguments))
            fault = self._chance(self.habits.fault)
            talk.say("tool", self.rng.choice(("error: timeout", "error: server error")) if fault else "")
            if not fault:
                talk.messages[-1]["content"] = self.tools.answer(name, arguments)
            if talk.turns + 1 >= cut:
                talk.say("user", ANSWER_NOW)
                return False
            if not fault:
                return True

    def _chance(self, rate: float) -> bool:
        return self.rng.random() < rate
