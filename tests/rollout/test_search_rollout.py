"""The search agent through the real gateway: prunes fork, nothing pruned comes back, each token is trained once."""

from __future__ import annotations

import asyncio
import json
import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inspan.config.search import Search
from inspan.engine.base import SamplingParams
from inspan.engine.scripted import ScriptedEngine
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML, format_call
from inspan.harness.search.corpus_tools import CorpusTools
from inspan.retrieval.base import Chunk
from inspan.retrieval.memory import MemoryIndex
from inspan.rollout.load import load_harness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.trace.chains import chains
from inspan.trace.records import Rollout, Terminal

WORDS = ["river", "mayor", "anthem", "harbour", "summit", "valley", "castle", "garden"]
CHUNKS = [
    Chunk(f"d{d}.{c}", f"d{d}", f"{WORDS[d]} {WORDS[(d + c) % 8]} unique{d}x{c}!", 0, 10)
    for d in range(8)
    for c in range(4)
]
TEXTS = {chunk.id: chunk.text for chunk in CHUNKS}
INDEX = MemoryIndex(CHUNKS)


def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


TOK = tokenizer()
END = TOK.token_to_id("<|im_end|>")


def actions(rng: random.Random, prompt: str) -> str:
    """What a model of no sense writes: any tools, sensible or not, sometimes broken, at last an answer."""
    shown = list(dict.fromkeys(re.findall(r"! \[(d\d\.\d)\]", prompt)))
    if rng.random() < 0.15 or prompt.count("<|im_start|>assistant") > 10:
        return "\n".join(f"{id}: it says so" for id in shown[:3]) or "nothing"
    calls = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        some = rng.sample(shown, rng.randrange(len(shown) + 1))
        name, arguments = rng.choice(
            [
                ("search_corpus", {"query": rng.choice(WORDS)}),
                ("search_corpus", {"query": f"unique{rng.randrange(8)}x{rng.randrange(4)}"}),
                ("read_document", {"doc_id": f"d{rng.randrange(9)}"}),
                ("grep_corpus", {"pattern": rng.choice(("river", "[", "unique.x1"))}),
                ("prune_chunks", {"chunk_ids": some}),
                ("prune_chunks", {"chunk_ids": [*some, "d9.9"]}),
                ("prune_chunks", {"chunk_ids": "d0.0 d1.1"}),
                ("nothing", {}),
            ]
        )
        text = format_call(name, json.dumps(arguments))
        calls.append(text[:-9] if rng.random() < 0.05 else text)
    return "\n".join([*(["Thus."] if rng.random() < 0.3 else []), *calls])


def episode(seed: int, search: Search, script=actions, limits: Limits | None = None) -> tuple[Rollout, ScriptedEngine]:
    rng = random.Random(seed)

    def play(policy: str, prompt: tuple[int, ...]) -> list[int]:
        return [*TOK.encode(script(rng, TOK.decode(list(prompt), skip_special_tokens=False))).ids, END]

    engine = ScriptedEngine(play, context_length=60_000)
    runner = Runner(
        Gateway(engine, ChatML(TOK)),
        load_harness("search"),
        (Role("main", "policy", True),),
        limits or Limits(critical_steps=24),
        SamplingParams(rng.choice((60, 400)) if script is actions else 400),
        60.0,
        make_tools=lambda task, seed, record: CorpusTools(INDEX, on_event=record),
        options={"search": search},
    )

    async def run() -> Rollout:
        try:
            return await runner.run(RolloutJob("r", Task("t", "Where?", "there"), "g", 0, 0, 1))
        finally:
            await runner.close()

    return asyncio.run(run()), engine


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(120, 900))
def test_pruned_text_never_comes_back_and_every_sampled_token_is_trained_once(seed: int, limit: int) -> None:
    rollout, engine = episode(seed, Search(limit=limit))
    assert rollout.terminal is Terminal.COMPLETED and rollout.complete, rollout.error
    prompts = [TOK.decode(list(one.prompt), skip_special_tokens=False) for one in engine.heard]
    call_of = {tool.id: index for index, call in enumerate(rollout.calls) for tool in call.tool_calls}
    for event in rollout.tool_events:
        for id in event.data.get("pruned", ()):
            assert not any(TEXTS[id] in later for later in prompts[call_of[event.call] + 1 :])
    by_id = {node.id: node for node in rollout.nodes}
    found = chains(rollout.sessions, rollout.nodes, rollout.calls)
    sampled = sum(len(node.tokens) - node.start for node in rollout.nodes)
    assert sum(sum(chain.trained) for chain in found) == sampled == sum(c.completion_tokens for c in rollout.calls)
    for call, heard in zip(rollout.calls, engine.heard, strict=True):
        path, at = by_id[call.node].tokens, by_id[call.node].parent  # type: ignore[index]
        start = by_id[call.node].start  # type: ignore[index]
        path = path[:start]
        while at is not None:
            path, at = by_id[at].tokens + path, by_id[at].parent
        assert path == heard.prompt, "what is trained stands in exactly the context that was seen"
    # A token that a prune left behind is trained in the chain in which it was sampled, and is context in the next.
    trained_in = [sum(chain.trained) for chain in found]
    assert all(trained_in), "no chain is there for nothing"


def test_a_prune_starts_a_new_chain_and_a_growing_view_does_not() -> None:
    plan = iter(
        [
            format_call("search_corpus", '{"query": "river"}'),
            format_call("search_corpus", '{"query": "mayor"}'),
            format_call("prune_chunks", '{"chunk_ids": ["d0.0"]}'),
            "d1.1: so it is",
        ]
    )
    rollout, _ = episode(1, Search(limit=50_000), lambda rng, prompt: next(plan))
    assert rollout.answer == "d1.1: so it is"
    assert len(chains(rollout.sessions, rollout.nodes, rollout.calls)) == 2
    forks = [node.fork for node in rollout.nodes if node.fork]
    assert forks == ["history rewritten"]


def test_the_agent_keeps_to_its_steps_and_the_gateway_never_has_to_stop_it() -> None:
    def endless(rng: random.Random, prompt: str) -> str:
        return format_call("search_corpus", json.dumps({"query": rng.choice(WORDS)}))

    rollout, _ = episode(3, Search(limit=40_000), endless, Limits(critical_steps=6))
    assert rollout.terminal is Terminal.COMPLETED and len(rollout.calls) == 6
    rollout, engine = episode(3, Search(limit=2000, reserve=300), endless, Limits(critical_steps=500))
    assert rollout.terminal is Terminal.COMPLETED
    assert "Answer now." in TOK.decode(list(engine.heard[-1].prompt))


def test_a_harness_without_a_corpus_fails_with_a_reason() -> None:
    runner = Runner(
        Gateway(ScriptedEngine([]), ChatML(TOK)),
        load_harness("search"),
        (Role("main", "policy", True),),
        Limits(),
        SamplingParams(10),
        60.0,
    )
    rollout = asyncio.run(runner.run(RolloutJob("r", Task("t", "Where?", "there"), "g", 0, 0, 1)))
    assert "needs the tools of a corpus" in str(rollout.error)
