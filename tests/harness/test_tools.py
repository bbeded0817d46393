"""The library tools: errors are texts, failures come at the set rate and from the seed alone."""

from __future__ import annotations

import asyncio

from inspan.harness.tools import Faults, Library, LibraryTools
from inspan.retrieval.corpus import Document
from inspan.trace.records import ToolEvent

LIBRARY = Library.of([Document(f"page {i}", f"text number {i}") for i in range(5)])


def call(tools: LibraryTools, name: str, session: str = "", **arguments: object) -> str:
    return asyncio.run(tools.call(name, arguments, call_id="c", session=session))


def test_search_then_read() -> None:
    tools = LibraryTools(LIBRARY)
    assert call(tools, "search", query="page 3").splitlines()[0] == "page 3"
    assert call(tools, "read", page=" page 3 ") == "text number 3"


def test_snippets_are_shown_when_asked_for() -> None:
    assert call(LibraryTools(LIBRARY, snippet_chars=11), "search", query="page 3").startswith("page 3: text number")


def test_what_is_wrong_comes_back_as_text() -> None:
    tools = LibraryTools(LIBRARY)
    assert call(tools, "read", page="page 9") == "error: no such page"
    assert call(tools, "read", page=3) == "error: no such page"
    assert call(tools, "search", query=None).startswith("error:")
    assert call(tools, "fly").startswith("error: no tool")
    assert call(tools, "search", query="zzz") == "nothing found"


def test_events_tell_what_failed() -> None:
    events: list[ToolEvent] = []
    tools = LibraryTools(LIBRARY, on_event=events.append)
    call(tools, "read", page="page 1")
    call(tools, "read", page="nowhere")
    assert [(e.name, e.ok, e.latency_s) for e in events] == [("read", True, 0.2), ("read", False, 0.2)]


def failures(seed: int, session: str = "", rate: float = 0.3) -> list[bool]:
    tools = LibraryTools(LIBRARY, faults=Faults(rate, seed))
    return [call(tools, "read", session, page="page 1").startswith("error:") for _ in range(300)]


def test_failures_come_at_the_set_rate_and_follow_from_the_seed() -> None:
    assert 60 < sum(failures(1)) < 120
    assert failures(1) == failures(1) != failures(2)
    assert sum(failures(1, rate=0.0)) == 0


def test_failures_do_not_depend_on_what_runs_beside() -> None:
    alone = failures(1, "a")
    tools = LibraryTools(LIBRARY, faults=Faults(0.3, 1))
    beside = []
    for _ in range(300):
        call(tools, "read", "b", page="page 1")
        beside.append(call(tools, "read", "a", page="page 1").startswith("error:"))
    assert beside == alone
