"""The search agent's reward is the published formula, each term with a switch; its figures are those of the field."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import Maker

from inspan.errors import RecipeError, TaskError
from inspan.rewards.metrics import rollout_metrics
from inspan.rewards.ranking import f_beta, ndcg, precision, recall, reciprocal_rank
from inspan.rewards.registry import resolve
from inspan.rewards.retrieval import retrieval, retrieval_figures, trajectory_of
from inspan.rewards.reward_set import RewardSet, WeightedTerm
from inspan.schedule import constant
from inspan.tasks.base import Task
from inspan.tasks.retrieval.answer import parse_ranked
from inspan.tasks.retrieval.evidence import evidence_of
from inspan.trace.records import Rollout, Terminal, ToolEvent

IDS = ["a.0", "a.1", "b.0", "b.1", "c.0", "d.0"]
META = {
    "hops": 2,
    "evidence": [["a.0", "b.1"], ["c.0"]],
    "documents": [["a", "b"], ["c"]],
    "answer_chunks": ["c.0"],
}
TASK = Task("t", "Where?", "there", "hops_2", meta=META)


def rollout(
    *steps: tuple[str, list[str]], answer: str | None = "", turns: int | None = None, task: Task = TASK, **options: Any
) -> Rollout:
    """One turn for each step; a step is ("show" | "prune" | "fail", chunk ids)."""
    make = Maker()
    main = make.session()
    for kind, ids in steps:
        name = "prune_chunks" if kind == "prune" else "search_corpus"
        (call,) = make.turn(main, name, ok=None)
        data = {"show": {"chunks": ids, "documents": [i.split(".")[0] for i in ids]}, "prune": {"pruned": ids}}
        make.events.append(ToolEvent("", call, name, kind != "fail", 0.3, data=data.get(kind, {})))
    for _ in range((turns or len(steps) + 1) - len(steps)):
        make.turn(main, content=answer or "")
    return make.rollout(answer=answer, task=task, **options)


def naive(one: Rollout, beta: float, turn_from: float, turn_to: float) -> float:
    """The formula, written once more from the report's words."""
    if one.terminal is not Terminal.COMPLETED:
        return 0.0
    seen = [id for event in one.tool_events for id in event.data.get("chunks", ())]
    output = [line.split(":")[0].strip() for line in (one.answer or "").splitlines() if ":" in line]
    output = list(dict.fromkeys(output))
    good = [id for id in output if id in seen and id in ("a.0", "b.1", "c.0")]
    r = (any(i in good for i in ("a.0", "b.1")) + ("c.0" in good)) / 2
    p = len(good) / len(output) if output else 0.0
    f = 0.0 if p == 0 or r == 0 else (1 + beta**2) * p * r / (beta**2 * p + r)
    t = (any(i in seen for i in ("a.0", "b.1")) + ("c.0" in seen)) / 2
    before = 0.7 * f + 0.3 * t + (1.0 if "c.0" in good else 0.0)
    kinds = [
        "one" if e.name == "prune_chunks" and len(e.data.get("pruned", ())) <= 1 else "other" for e in one.tool_events
    ]
    streak = max((len(list(run)) for kind, run in itertools.groupby(kinds) if kind == "one"), default=0)
    p_prune = min(0.5, 0.1 * max(0, streak - 3))
    turns = len(one.calls)
    p_turn = 0.0 if turns <= turn_from else min(0.5, 0.5 * (turns - turn_from) / (turn_to - turn_from))
    return min(max(before - p_prune - p_turn, 0.001), max(0.001, before))


steps = st.lists(
    st.tuples(st.sampled_from(["show", "show", "prune", "prune", "fail"]), st.lists(st.sampled_from(IDS), max_size=3)),
    max_size=12,
)


@given(
    steps,
    st.lists(st.sampled_from([*IDS, "zz"]), max_size=6),
    st.floats(0, 1),
    st.sampled_from([Terminal.COMPLETED] * 4 + [Terminal.LIMIT, Terminal.FAILED]),
    st.integers(0, 8),
)
def test_the_reward_is_the_formula(
    done: list[tuple[str, list[str]]], listed: list[str], progress: float, end: Terminal, more: int
) -> None:
    answer = "\n".join(f"{id}: why" for id in listed)
    one = rollout(*done, answer=answer, turns=len(done) + 1 + more, terminal=end)
    term = retrieval(turn_from=6, turn_to=16)
    assert term.at(progress)(one) == pytest.approx(naive(one, 4 - 2 * progress, 6, 16), abs=1e-12)


GOOD = "c.0: there\na.0: via"


def test_each_term_has_its_own_switch() -> None:
    found = rollout(("show", ["a.0", "c.0", "d.0"]), answer="a.0: x")
    off = {"f": 0.0, "trajectory": 0.0, "answer": 0.0, "floor": 0.0}
    assert retrieval(**off)(found) == 0.0
    assert retrieval(**{**off, "trajectory": 0.3})(found) == pytest.approx(0.3)
    assert retrieval(**{**off, "f": 0.7})(found) == pytest.approx(0.7 * f_beta(1.0, 0.5, 2.0))
    assert retrieval(**{**off, "answer": 1.0})(found) == 0.0
    assert retrieval(**{**off, "answer": 1.0})(rollout(("show", ["c.0"]), answer=GOOD)) == 1.0


def test_pruning_one_at_a_time_is_fined_from_the_fourth_on_and_in_bulk_is_not() -> None:
    show = ("show", IDS)
    free = retrieval()(rollout(show, *[("prune", [id]) for id in IDS[:3]], answer=GOOD))
    streak = retrieval()(rollout(show, *[("prune", [id]) for id in IDS[:5]], answer=GOOD))
    bulk = retrieval()(rollout(show, ("prune", IDS[:5]), answer=GOOD))
    broken = retrieval()(rollout(show, *[("prune", [i]) for i in IDS[:3]], show, ("prune", ["b.1"]), answer=GOOD))
    assert free == bulk == broken == 2.0
    assert streak == pytest.approx(1.8)
    assert retrieval(prune_step=0)(rollout(show, *[("prune", [id]) for id in IDS[:5]], answer=GOOD)) == 2.0
    worst = retrieval()(rollout(show, *[("prune", [])] * 30, answer=GOOD))
    assert worst == pytest.approx(1.5), "the fine has a cap"


def test_endless_search_is_fined_linearly() -> None:
    term = retrieval(turn_from=4, turn_to=8)
    values = [term(rollout(("show", ["a.0", "c.0"]), answer=GOOD, turns=n)) for n in (2, 4, 6, 8, 20)]
    assert values == pytest.approx([2.0, 2.0, 1.75, 1.5, 1.5])


def test_the_floor_is_for_those_that_finish() -> None:
    nothing = ("show", ["d.0"])
    assert retrieval()(rollout(nothing, answer="d.0: x")) == 0.001
    assert retrieval()(rollout(nothing, answer="")) == 0.001
    assert retrieval()(rollout(("show", ["a.0"]), answer=None, terminal=Terminal.LIMIT)) == 0.0
    fined = retrieval()(rollout(("show", ["a.0"]), *[("prune", [])] * 30, answer=""))
    assert fined == 0.001, "a fine leaves the floor"


def test_what_was_pruned_still_counts_as_seen_and_may_be_listed() -> None:
    one = rollout(("show", ["a.0", "c.0"]), ("prune", ["a.0", "c.0"]), answer=GOOD)
    assert retrieval()(one) == 2.0
    assert retrieval_figures(one)["trajectory_recall"] == 1.0
    assert retrieval_figures(one)["prune_accuracy"] == 0.0


def test_a_chunk_that_was_never_shown_is_wrong_whatever_it_holds() -> None:
    guessed = retrieval_figures(rollout(("show", ["d.0"]), answer=GOOD))
    assert guessed["output_recall"] == guessed["answer_found"] == guessed["precision"] == 0.0


def test_documents_are_judged_where_asked_for() -> None:
    one = rollout(("show", ["a.1", "c.0"]), answer="a.1: near\nc.0: there")
    assert retrieval()(one) == pytest.approx(0.7 * f_beta(0.5, 0.5, 2.0) + 0.15 + 1.0)
    assert retrieval(level="document")(one) == 2.0


def test_beta_goes_from_four_to_two_over_the_run() -> None:
    one = rollout(("show", ["a.0", "d.0", "c.0"]), answer="c.0: x\na.0: y\nd.0: z")
    terms = RewardSet([WeightedTerm("retrieval", resolve("retrieval"), constant(1.0))])
    early, late = (asyncio.run(terms.score([one], at))[0].reward for at in (0.0, 1.0))
    assert early == pytest.approx(0.7 * f_beta(2 / 3, 1, 4) + 1.3)
    assert late == pytest.approx(0.7 * f_beta(2 / 3, 1, 2) + 1.3)


def test_a_task_without_evidence_has_no_score() -> None:
    plain = Task("t", "Where?", "there")
    assert retrieval()(rollout(("show", ["a.0"]), answer=GOOD, task=plain)) is None
    assert retrieval_figures(rollout(answer=GOOD, task=plain)) == {}
    assert "item_f1" in rollout_metrics(rollout(answer=GOOD, task=plain))


def test_the_figures_of_a_retrieval_task_stand_in_the_place_of_item_f1() -> None:
    figures = rollout_metrics(rollout(("show", ["a.0", "b.1", "c.0"]), ("prune", ["d.0"]), answer=GOOD))
    assert "item_f1" not in figures
    assert figures["f1"] == figures["output_recall"] == figures["ndcg"] == figures["prune_accuracy"] == 1.0
    assert figures["tool_calls_per_turn"] == 1.0


@pytest.mark.parametrize(
    "params",
    [{"f": -1.0}, {"turn_from": 8, "turn_to": 8}, {"beta_to": 0.0}, {"level": "page"}, {"betta": 1}, {"floor": -0.1}],
)
def test_a_faulty_parameter_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        resolve("retrieval", params)


@pytest.mark.parametrize(
    "meta",
    [
        {"evidence": []},
        {"evidence": [[]]},
        {"evidence": "a.0"},
        {"evidence": [[1]]},
        {"evidence": [["a"]], "documents": [["a"], ["b"]]},
        {"evidence": [["a"]], "answer_chunks": "a"},
    ],
)
def test_malformed_evidence_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(TaskError):
        evidence_of(Task("t", "q", "a", meta=meta))


# ---- the answer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, ids",
    [
        ("k17.2: because\nb03.1: bridge", ["k17.2", "b03.1"]),
        ("It is there [k17.2]\n2) A bridge: so it says [b03.1].", ["k17.2", "b03.1"]),
        ("1. k17.2: because\n2) b03.1 - bridge", ["k17.2"]),
        ("[k17.2]\nsee a.md [docs/my a.md#3]", ["k17.2", "docs/my a.md#3"]),
        ("- [k17.2]: because\n* `b03.1`: x", ["k17.2", "b03.1"]),
        ("k17.2\nb03.1", ["k17.2", "b03.1"]),
        ("Here is what I found:\nk17.2: a\nk17.2: again", ["k17.2"]),
        ("```\nk17.2: a\n```", ["k17.2"]),
        ("docs/a.md#3: a path\n**b.1**: bold", ["docs/a.md#3", "b.1"]),
        ("", []),
        ("I do not know.", []),
    ],
)
def test_the_ranked_answer_is_read_as_models_write_it(text: str, ids: list[str]) -> None:
    assert [row.id for row in parse_ranked(text)] == ids


def test_known_ids_may_hold_spaces_and_colons() -> None:
    known = ["my notes.md#1", "my notes.md#12", "a:b#0"]
    text = "1. my notes.md#12: here\n- [a:b#0]: there\nmy notes.md#1\nk17: other"
    assert parse_ranked(text, known) == [
        ("my notes.md#12", "here"),
        ("a:b#0", "there"),
        ("my notes.md#1", ""),
        ("k17", "other"),
    ]


@given(st.text())
def test_reading_an_answer_never_raises(text: str) -> None:
    ids = [row.id for row in parse_ranked(text)]
    assert len(set(ids)) == len(ids)


# ---- figures against others -----------------------------------------------------------------------------------------

lists = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(lists, st.lists(st.sets(st.sampled_from("abcdefghij"), min_size=1, max_size=3), min_size=1, max_size=4))
def test_figures_of_facts_are_what_they_say(items: list[str], facts: list[set[str]]) -> None:
    covered: set[int] = set()
    gain = 0.0
    for place, item in enumerate(items, 1):
        new = {i for i, fact in enumerate(facts) if item in fact} - covered
        gain += bool(new) / math.log2(place + 1)
        covered |= new
    assert ndcg(items, facts) == pytest.approx(gain / sum(1 / math.log2(i + 2) for i in range(len(facts))))
    assert recall(items, facts) == len(covered) / len(facts)
    assert all(0 <= value <= 1 for value in (ndcg(items, facts), precision(items, facts), recall(items, facts)))


@pytest.mark.external
def test_ndcg_reciprocal_rank_precision_and_recall_are_those_of_ir_measures() -> None:
    ir_measures = pytest.importorskip("ir_measures", reason="ir-measures is not installed")
    rng = random.Random(0)
    for _ in range(200):
        items = rng.sample("abcdefghijkl", rng.randint(1, 8))
        relevant = rng.sample("abcdefghijkl", rng.randint(1, 5))
        run = {"q": {item: float(len(items) - place) for place, item in enumerate(items)}}
        judged = {"q": dict.fromkeys(relevant, 1)}
        squared = ir_measures.SetF(beta=4.0)  # trec_eval's beta is the square of ours
        measures = [ir_measures.nDCG, ir_measures.RR, ir_measures.SetP, ir_measures.SetR, squared]
        theirs = ir_measures.calc_aggregate(measures, judged, run)
        facts = [{one} for one in relevant]
        p, r = precision(items, facts), recall(items, facts)
        ours = [ndcg(items, facts), reciprocal_rank(items, facts), p, r, f_beta(p, r, 2.0)]
        assert ours == pytest.approx([theirs[measure] for measure in measures], abs=1e-9)


def test_a_trajectory_is_read_from_the_events() -> None:
    path = trajectory_of(rollout(("show", ["a.0"]), ("fail", []), ("prune", ["a.0"]), answer="a.0: x"))
    assert (path.seen, path.pruned, path.output, path.turns) == (("a.0",), ("a.0",), ("a.0",), 4)
    assert path.prunes == (-1, -1, 1) and path.streak == 1
