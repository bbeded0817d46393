"""Rollouts through the real gateway, the built-in agents and ordinary clients, on a scripted engine."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inspan.engine.base import SamplingParams, WeightsRef
from inspan.engine.scripted import ScriptedEngine
from inspan.errors import EngineError
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML, format_call
from inspan.harness.tools import Faults, Library, LibraryTools
from inspan.retrieval.corpus import Document
from inspan.rollout.dispatcher import Dispatcher, DispatchSettings
from inspan.rollout.executor import LocalExecutor
from inspan.rollout.load import load_harness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.trace.chains import trained_chains
from inspan.trace.records import Terminal
from inspan.trace.store import TraceStore

LIBRARY = Library.of([Document("oslo", "Oslo is the capital of Norway."), Document("rome", "Rome is in Italy.")])
SINGLE = (Role("main", "policy", True),)
SWARM = (Role("orchestrator", "policy", True), Role("subagent", "policy@v0", False))


def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


class World:
    """Gateway, engine and runner around a script that says, for the text of a prompt, what the model writes."""

    def __init__(self, script, harness="single", roles=SINGLE, store=None, **fields):
        tok = tokenizer()
        self.renderer = ChatML(tok)
        end = tok.token_to_id("<|im_end|>")

        def play(policy, prompt):
            said = script(policy, tok.decode(prompt, skip_special_tokens=False))
            return said if isinstance(said, Exception) else [*tok.encode(said).ids, end]

        self.engine = ScriptedEngine(play, context_length=50_000, hold=fields.pop("hold", None))
        self.gateway = Gateway(self.engine, self.renderer, store=store)
        loaded = load_harness(harness)
        limits = fields.pop("limits", Limits(critical_steps=8, width=4))
        self.runner = Runner(
            self.gateway,
            loaded,
            roles,
            limits,
            SamplingParams(400),
            fields.pop("timeout_s", 60.0),
            make_tools=lambda task, seed, record: LibraryTools(LIBRARY, faults=Faults(seed=seed), on_event=record),
            version=lambda: self.engine.version("policy"),
            **fields,
        )
        self.executor = LocalExecutor(self.runner)

    async def run(self, name="g000000.0"):
        task = Task("t", "Where is Oslo?", "Norway")
        try:
            return await self.runner.run(RolloutJob(name, task, "g000000", 0, 0, 11))
        finally:
            await self.runner.close()


def searches(policy, text):
    """Search once, then answer."""
    return "Norway" if "<|im_start|>tool" in text else format_call("search", '{"query": "Oslo"}')


async def test_a_single_agent_completes_and_its_chain_is_what_the_engine_saw():
    world = World(searches)
    rollout = await world.run()
    assert (rollout.terminal, rollout.answer) == (Terminal.COMPLETED, "Norway"), rollout.error
    assert [(event.name, event.ok) for event in rollout.tool_events] == [("search", True)]
    (chain,) = trained_chains(rollout)
    last = world.engine.heard[-1]
    assert chain.tokens[: len(last.prompt)] == last.prompt
    assert [call.finish for call in rollout.calls] == ["tool_calls", "stop"]


async def test_the_stored_rollout_is_the_one_that_was_emitted(tmp_path):
    with TraceStore(tmp_path / "t.db") as store:
        world = World(searches, store=store)
        made = Dispatcher(world.executor, lambda: Task("t", "q", "a"), DispatchSettings(1, 2), store=store)
        (group,) = await made.collect()
        for rollout in group.rollouts:
            assert store.load_rollout(rollout.id, group.task) == rollout
        await world.executor.close()


async def test_a_swarm_has_its_sub_agents_sessions_and_only_the_orchestrator_is_trained():
    def script(policy, text):
        if policy == "policy@v0":
            return "Norway"
        if "<|im_start|>tool" in text:
            return "It is in Norway"
        create = format_call("create_subagent", '{"name": "a", "system_prompt": "You look up."}')
        assign = format_call("assign_task", '{"agent": "a", "prompt": "Where is Oslo?"}')
        return create + "\n" + assign + "\n" + assign

    rollout = await World(script, "swarm", SWARM).run()
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    assert sorted((s.agent, s.trainable) for s in rollout.sessions) == [
        ("orchestrator", True),
        ("subagent", False),
        ("subagent", False),
    ]
    trained = {chain.agent for chain in trained_chains(rollout) if any(chain.trained)}
    assert trained == {"orchestrator"}


async def test_a_model_that_never_stops_searching_ends_by_itself_at_the_agents_budget():
    rollout = await World(lambda policy, text: format_call("search", '{"query": "Oslo"}')).run()
    assert rollout.terminal in (Terminal.COMPLETED, Terminal.LIMIT) and rollout.terminal.scored
    assert len(rollout.calls) <= 9


async def test_a_user_agent_that_floods_is_stopped_by_the_gateway():
    def flood(task, ctx):
        model = ctx.model("main")
        client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        n = 0
        while True:
            n += 1
            client.chat.completions.create(model=model.name, messages=[{"role": "user", "content": str(n)}])

    rollout = await World(lambda policy, text: "words", flood, limits=Limits(calls=5)).run()
    assert rollout.terminal is Terminal.LIMIT
    assert sum(call.node is not None for call in rollout.calls) == 5


async def test_a_users_plain_function_with_the_ordinary_client_over_a_socket():
    def mine(task, ctx):
        model = ctx.model("main")
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            reply = client.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": task.prompt}], max_tokens=50
            )
        return reply.choices[0].message.content

    rollout = await World(lambda policy, text: "Norway", mine).run()
    assert (rollout.terminal, rollout.answer) == (Terminal.COMPLETED, "Norway"), rollout.error


async def test_broken_json_over_a_socket_ends_nothing_but_that_call():
    import urllib.error
    import urllib.request

    def broken(task, ctx):
        model = ctx.model("main")
        request = urllib.request.Request(model.base_url + "/chat/completions", b"{nonsense", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request)
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            reply = client.chat.completions.create(model="main", messages=[{"role": "user", "content": "x"}])
        return reply.choices[0].message.content

    rollout = await World(lambda policy, text: "fine", broken).run()
    assert (rollout.terminal, rollout.complete) == (Terminal.COMPLETED, True), rollout.error


async def test_an_engine_fault_in_mid_episode_is_retried_as_a_new_attempt_and_succeeds():
    crashed = []

    async def twice(task, ctx):
        model = ctx.model("main")
        client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
        messages = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=model.name, messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": "more"}]
        return "done"

    def script(policy, text):
        if "more" in text and not crashed:
            crashed.append(text)
            return EngineError("the engine crashed")
        return "Norway"

    world = World(script, twice)
    made = Dispatcher(world.executor, lambda: Task("t", "q", "a"), DispatchSettings(1, 1, retries=1))
    (group,) = await made.collect()
    (rollout,) = group.rollouts
    assert (rollout.terminal, rollout.attempt) == (Terminal.COMPLETED, 1)
    assert made.meter.report()["retries"] == 1.0
    await world.executor.close()


async def test_a_hang_inside_a_model_call_times_out_and_the_engine_is_let_go():
    asked, ring = asyncio.Event(), asyncio.Event()

    def hold(heard):
        if len(world.engine.heard) < 2:
            return None
        ring.set()
        return asked

    async def timer(seconds):
        await ring.wait()

    world = World(searches, hold=hold, timer=timer)
    rollout = await world.run()
    assert rollout.terminal is Terminal.TIMED_OUT
    assert sum(call.node is not None for call in rollout.calls) == 1
    assert rollout.complete


async def test_new_weights_in_mid_rollout_show_in_the_versions():
    def script(policy, text):
        return searches(policy, text)

    world = World(script)
    tools = world.runner.make_tools
    assert tools is not None

    class Publishing:
        def __init__(self, inner):
            self.inner, self.schemas = inner, inner.schemas

        async def call(self, name, arguments, **kwargs):
            await world.engine.load("policy", WeightsRef(4))
            return await self.inner.call(name, arguments, **kwargs)

    world.runner.make_tools = lambda *args: Publishing(tools(*args))
    rollout = await world.run()
    (chain,) = trained_chains(rollout)
    assert {v for v, t in zip(chain.versions, chain.trained, strict=True) if t} == {0, 4}
    assert (rollout.version_started, rollout.version_finished) == (0, 4)


async def test_what_is_drawn_does_not_depend_on_how_many_run_beside_it():
    async def heard(concurrency, harness):
        world = World(searches, harness)
        names = iter(range(4))
        made = Dispatcher(
            world.executor,
            lambda: Task(f"t{next(names)}", "q", "a"),
            DispatchSettings(2, 3, concurrency=concurrency),
            seed=3,
        )
        await made.collect()
        await world.executor.close()
        return sorted((h.prompt, h.params.seed) for h in world.engine.heard)

    first = await heard(1, "single")
    assert len({seed for _, seed in first}) == 12
    assert await heard(6, "single") == first


async def test_user_agents_that_block_do_not_hold_up_each_other():
    """All of a batch block at once until the last has come; if they shared a thread, none would ever end."""
    barrier = threading.Barrier(6)

    def meets(task, ctx):
        barrier.wait()
        model = ctx.model("main")
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            reply = client.chat.completions.create(model="main", messages=[{"role": "user", "content": "x"}])
        return reply.choices[0].message.content

    world = World(lambda policy, text: "fine", meets)
    made = Dispatcher(world.executor, lambda: Task("t", "q", "a"), DispatchSettings(2, 3, concurrency=6))
    groups = await made.collect()
    assert {r.terminal for g in groups for r in g.rollouts} == {Terminal.COMPLETED}
    await world.executor.close()
