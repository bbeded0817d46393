"""The search agent's budget: what a turn shows, what is refused, what a prune takes out of view."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.config.search import Search
from inspan.errors import RecipeError
from inspan.harness.loop import ANSWER_NOW, requests_of
from inspan.harness.search.budget import Budget
from inspan.harness.search.corpus_tools import CorpusTools
from inspan.harness.search.session import SearchSession, chunk_ids
from inspan.harness.search.tokens import counter, estimate
from inspan.harness.tools import Faults
from inspan.retrieval.base import Chunk
from inspan.retrieval.memory import MemoryIndex

WORDS = ["river", "mayor", "anthem", "harbour", "summit", "valley", "castle", "garden"]
CHUNKS = [
    Chunk(f"d{d}.{c}", f"d{d}", f"{WORDS[d]} {WORDS[(d + c) % 8]} unique{d}x{c} " + "filler " * 6, 60 * c, 20)
    for d in range(8)
    for c in range(4)
]
INDEX = MemoryIndex(CHUNKS)


def words(text: str) -> int:
    return len(text.split())


def session(limit: int = 400, events: list | None = None, steps: int | None = None, **search: Any) -> SearchSession:
    budget = Budget(Search(limit=limit, **search).scaled(10**6))
    tools = CorpusTools(INDEX, on_event=None if events is None else events.append)
    return SearchSession("Where is the river?", "You search.", tools, budget, words, steps)


def reply(*calls: tuple[str, Any], content: str = "") -> dict[str, Any]:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}


def play(one: SearchSession, *calls: tuple[str, Any], content: str = "") -> str | None:
    said = reply(*calls, content=content)
    return one.take(said, requests_of(said))


def last(one: SearchSession) -> str:
    return one.prompt()[-1]["content"]


def test_every_turn_shows_what_is_used_of_the_limit() -> None:
    one = session()
    assert last(one).endswith("/400]") and last(one).startswith("Where is the river?\n[Token usage: ")
    play(one, ("search_corpus", {"query": "river"}))
    shown = [m["content"] for m in one.prompt() if "Token usage" in m["content"]]
    assert len(shown) == 2, "the line of a turn stays where it was"


def test_a_search_is_cut_to_the_call_budget_and_excludes_what_was_seen_also_when_pruned() -> None:
    one = session(per_call=45)
    play(one, ("search_corpus", {"query": "river mayor"}))
    first = one.view.visible
    assert 1 <= len(first) <= 4
    play(one, ("prune_chunks", {"chunk_ids": first}), ("search_corpus", {"query": "river mayor"}))
    assert one.view.visible and not set(first) & set(one.view.visible)


def test_a_tight_budget_makes_calls_smaller() -> None:
    budget = Budget(Search(limit=32768).scaled(40000))
    assert [budget.allowance(used) for used in (0, 20000, 28268, 32000)] == [4096, 4096, 2000, 512]


def test_the_published_numbers_scale_with_the_context() -> None:
    assert Search().scaled(32768) == Search(
        limit=32768, reserve=500, soft=16384, hard=24326, per_call=4096, per_call_floor=512
    )
    small = Search().scaled(1024)
    assert (small.soft, small.hard, small.per_call, small.per_call_floor) == (512, 760, 128, 16)
    with pytest.raises(RecipeError, match=r"search\.limit"):
        Search(limit=5000).scaled(4096)


def test_the_note_beyond_the_soft_threshold_is_not_kept() -> None:
    one = session(soft=20, hard=380)
    play(one, ("search_corpus", {"query": "river"}))
    noted = last(one)
    assert noted.endswith("Prune chunks or conclude.")
    play(one, ("prune_chunks", {"chunk_ids": one.view.visible}))
    earlier = [m["content"] for m in one.prompt()[:-1]]
    assert not any("conclude" in text for text in earlier)


def test_beyond_the_hard_threshold_only_prune_works_and_the_error_says_so() -> None:
    events: list = []
    one = session(limit=200, hard=60, soft=50, per_call=60, events=events)
    play(one, ("search_corpus", {"query": "river"}))
    assert one.view.used() > 60
    for tool, arguments in (
        ("search_corpus", {"query": "mayor"}),
        ("grep_corpus", {"pattern": "mayor"}),
        ("read_document", {"doc_id": "d1"}),
    ):
        play(one, (tool, arguments))
        assert "only prune_chunks works now" in last(one)
    assert [event.ok for event in events] == [True, False, False, False]
    play(one, ("prune_chunks", {"chunk_ids": one.view.visible}))
    assert events[-1].ok and "pruned" in last(one)


def test_when_nothing_is_left_but_the_reserve_the_answer_is_asked_for() -> None:
    one = session(limit=150, reserve=30, hard=110, soft=100, per_call=100)
    while not one.last:
        assert play(one, ("search_corpus", {"query": "river mayor"})) is None
    assert last(one) == ANSWER_NOW
    assert play(one, ("search_corpus", {"query": "mayor"}), content="d0.0: why") == "d0.0: why"


def test_the_step_before_the_last_asks_for_the_answer() -> None:
    one = session(steps=3)
    play(one, ("search_corpus", {"query": "river"}))
    assert last(one) != ANSWER_NOW
    play(one, ("search_corpus", {"query": "mayor"}))
    assert last(one) == ANSWER_NOW and one.last


def test_reading_shows_the_rest_of_a_document_in_order_and_what_suits_best_when_not_all_fits() -> None:
    one = session()
    play(one, ("search_corpus", {"query": "unique3x2"}))
    play(one, ("read_document", {"doc_id": "d3"}))
    of_document = [id for id in one.view.visible if id.startswith("d3.")]
    assert sorted(of_document) == ["d3.0", "d3.1", "d3.2", "d3.3"]
    tight = session(limit=120, hard=70, soft=60, per_call=30, per_call_floor=24)
    play(tight, ("search_corpus", {"query": "unique3x3"}))
    play(tight, ("read_document", {"doc_id": "d3"}))
    assert "more do not fit" in last(tight)


@pytest.mark.parametrize(
    "call, says",
    [
        (("search_corpus", {"query": "  "}), "query must be a text"),
        (("search_corpus", {}), "query must be a text"),
        (("search_corpus", {"query": "nowhereword"}), "nothing new found"),
        (("grep_corpus", {"pattern": "("}), "error: "),
        (("read_document", {"doc_id": "nope"}), "error: no document"),
        (("read_document", {"doc_id": 7}), "doc_id must be a text"),
        (("prune_chunks", {"chunk_ids": ["x"]}), "not in view: x"),
        (("prune_chunks", {"chunk_ids": 3}), "must be a list of chunk ids"),
        (("prune_chunks", {}), "must be a list of chunk ids"),
        (("open_page", {"page": "a"}), "no tool open_page"),
    ],
)
def test_what_cannot_be_done_is_told_to_the_model(call: tuple[str, Any], says: str) -> None:
    events: list = []
    one = session(events=events)
    assert play(one, call) is None
    assert says in last(one)
    assert len(events) == 1 and events[0].ok == (not one.prompt()[-1]["content"].startswith("error"))


def test_arguments_that_are_no_object_are_told_to_the_model() -> None:
    one = session()
    said = reply(("search_corpus", ["river"]))
    one.take(said, requests_of(said))
    assert "not a JSON object" in last(one)


def test_a_query_of_a_hundred_kilobytes_is_an_ordinary_query() -> None:
    one = session(limit=10**6)
    play(one, ("search_corpus", {"query": "river " * 17000}))
    assert one.view.visible


def test_events_name_the_chunks_that_were_brought_and_pruned() -> None:
    events: list = []
    one = session(events=events)
    play(one, ("search_corpus", {"query": "unique1x1"}))
    play(one, ("prune_chunks", {"chunk_ids": ["d1.1", "other"]}))
    assert "d1.1" in events[0].data["chunks"] and "d1" in events[0].data["documents"]
    assert events[1].data == {"pruned": ["d1.1"]}
    assert "not in view: other" in last(one)


def test_without_pruning_the_tool_is_unknown_and_the_note_does_not_speak_of_it() -> None:
    one = session(soft=10, hard=300, prune=False)
    play(one, ("prune_chunks", {"chunk_ids": ["d1.1"]}))
    assert "no tool prune_chunks" in last(one) and "rune chunks" not in last(one).split("\n")[-1]


def test_tools_can_fail() -> None:
    tools = CorpusTools(INDEX, faults=Faults(1.0))
    one = SearchSession("q", "s", tools, Budget(Search(limit=300).scaled(300)), words)
    play(one, ("search_corpus", {"query": "river"}))
    assert "error: " in last(one) and not one.view.seen


async def test_other_harnesses_use_the_corpus_as_plain_tools() -> None:
    tools = CorpusTools(INDEX)
    found = await tools.call("grep_corpus", {"pattern": "unique2x."}, call_id="c")
    assert [line.split()[-1] for line in found.splitlines()] == ["[d2.0]", "[d2.1]", "[d2.2]", "[d2.3]"]
    assert (await tools.call("read_document", {"doc_id": "zz"}, call_id="c")).startswith("error:")


@pytest.mark.parametrize(
    "given, ids",
    [
        (["a", "[b]", "a", 7], ["a", "b", "7"]),
        ("a, b;c\nd", ["a", "b", "c", "d"]),
        ({"a": 1}, []),
        (None, []),
        ([None, True, ""], []),
    ],
)
def test_ids_are_read_as_models_write_them(given: Any, ids: list[str]) -> None:
    assert chunk_ids(given) == ids


def test_tokens_are_counted_by_the_models_tokenizer_or_estimated() -> None:
    from inspan.train.models import shipped

    assert estimate("x" * 9) == 3
    exact = counter(str(shipped("tiny")))
    assert exact("Find the capital of Niger") > 3
    assert counter(None) is estimate


ACTIONS = ("search_corpus", "grep_corpus", "read_document", "prune_chunks")


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(60, 500))
def test_whatever_is_done_pruned_text_is_gone_and_the_limit_holds(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    one = session(limit=limit, steps=rng.choice([None, 12]))
    texts = {chunk.id: chunk.text for chunk in CHUNKS}
    while True:
        prompt = "\n".join(message["content"] for message in one.prompt())
        assert not any(texts[id] in prompt for id in one.view.pruned)
        assert all(prompt.count(texts[id]) == 1 for id in one.view.visible)
        assert "conclude" not in "".join(message["content"] for message in one.prompt()[:-1])
        calls = []
        for _ in range(rng.randrange(4)):
            name = rng.choice(ACTIONS)
            argument = {
                "search_corpus": {"query": rng.choice(WORDS)},
                "grep_corpus": {"pattern": rng.choice([*WORDS, "("])},
                "read_document": {"doc_id": f"d{rng.randrange(9)}"},
                "prune_chunks": {"chunk_ids": rng.sample([*texts, "zz"], rng.randrange(6)) + one.view.visible[:2]},
            }[name]
            calls.append((name, argument))
        answer = play(one, *calls, content="d0.0: why")
        if answer is not None:
            break
    # A call brings at most the room there is; what overshoots is the model's own words and the tools' short messages.
    assert one.view.used() <= limit + 140
