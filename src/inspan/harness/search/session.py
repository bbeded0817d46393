"""One episode of the search agent, without its model. Contract: pure but for the tools; a reply in, the next turn out.

`prompt` is what the model is to be shown, `take` what it answered. Tool calls of a turn run in the order in which they
were written, so that a prune makes room for the search behind it. The budget line is part of the conversation; the note
beyond the soft threshold is shown in that turn only. A prune, and a note that is gone, change what stands before: the
prompt forks there, as any edit does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from inspan.harness.loop import ANSWER_NOW, ToolRequest
from inspan.harness.search.budget import Budget
from inspan.harness.search.corpus_tools import CorpusTools, Want
from inspan.harness.search.tokens import Count
from inspan.harness.search.view import Part, View

PRUNE_NAME = "prune_chunks"


@dataclass(slots=True)
class SearchSession:
    """The state of an episode. `steps` is the limit on critical steps; a turn costs `max(1, tool calls)`."""

    question: str
    system: str
    tools: CorpusTools
    budget: Budget
    count: Count
    steps: int | None = None
    name: str = ""  # tells the executions of one sub-agent from those of another
    spent: int = 0
    last: bool = False  # whether the next reply is the answer, whatever it holds
    view: View = field(init=False)
    _focus: str = field(init=False)

    def __post_init__(self) -> None:
        self.view = View(self.count)
        self._focus = self.question
        self.view.say("system", self.system)
        self.view.say("user", self.question)
        self._close_turn()

    def prompt(self) -> list[dict[str, Any]]:
        """The messages of the next model call."""
        return self.view.messages(None if self.last else self.budget.note(self.view.used()))

    def room(self, most: int) -> int:
        """Tokens that the next reply may have: `most`, or what the limit leaves, but always a few."""
        return max(16, min(most, self.budget.search.limit - self.view.used()))

    def take(self, reply: dict[str, Any], requests: Sequence[ToolRequest]) -> str | None:
        """Take in what the model said: the answer when it is one, else None, and the next prompt is ready."""
        self.view.reply(reply)
        self.spent += max(1, len(requests))
        if not requests or self.last:
            return reply["content"]
        for request in requests:
            self.view.result(request.id, self._run(request))
        self._close_turn()
        return None

    def _close_turn(self) -> None:
        used = self.view.used()
        self.view.append(self.budget.line(used))
        self.last = self.budget.over(used) or (self.steps is not None and self.spent + 1 >= self.steps)
        if self.last and self.spent:
            self.view.say("user", ANSWER_NOW)

    def _run(self, request: ToolRequest) -> list[Part]:
        """Run one tool call; the parts of its result."""
        if request.arguments is None:
            return self._refused(request, "error: arguments are not a JSON object")
        if request.name == PRUNE_NAME and self.budget.search.prune:
            return self._prune(request, request.arguments.get("chunk_ids"))
        used = self.view.used()
        if refusal := self.budget.refusal(used):
            return self._refused(request, refusal)
        reading = request.name == "read_document"
        room = self.budget.reading(used) if reading else self.budget.allowance(used)
        want = Want(room, self.count, self.view.seen, self._focus)
        found = self.tools.find(request.name, request.arguments, want, call_id=request.id, session=self.name)
        if request.name == "search_corpus" and found.chunks:
            self._focus = str(request.arguments["query"])
        return [*found.chunks, *([found.text] if found.text else [])]

    def _refused(self, request: ToolRequest, error: str) -> list[Part]:
        self.tools.record(request.name, request.id, self.name, error, {})
        return [error]

    def _prune(self, request: ToolRequest, given: Any) -> list[Part]:
        ids = chunk_ids(given)
        if not ids:
            return self._refused(request, "error: chunk_ids must be a list of chunk ids")
        visible = set(self.view.visible)
        known = [id for id in ids if id in visible]
        unknown = [id for id in ids if id not in visible]
        missing = f"not in view: {', '.join(unknown[:5])}{' …' if len(unknown) > 5 else ''}"
        if not known:
            return self._refused(request, f"error: {missing}")
        self.view.prune(known)
        self.tools.record(request.name, request.id, self.name, "", {"pruned": known})
        return [f"pruned {len(known)}" + (f"; {missing}" if unknown else "")]


def chunk_ids(given: Any) -> list[str]:
    """The ids that a model gave: a list of texts or numbers, or one text with commas or spaces; each once.

    Brackets around an id, as chunks are shown, are taken off.
    """
    if isinstance(given, str):
        given = re.split(r"[,;\s]+", given)
    if not isinstance(given, list):
        return []
    ids = [str(one).strip().strip("[]") for one in given if isinstance(one, str | int) and not isinstance(one, bool)]
    return list(dict.fromkeys(id for id in ids if id))
