"""Episodes of the `single` harness without harness and gateway, and the ways to play them: freely, or in lock-step.

Contract: the same messages, tools, limits and sampling as the harness has behind the gateway, so that both can be timed
against each other (`episodes.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inspan.config import load
from inspan.engine.base import SamplingParams
from inspan.gateway.render import ParsedCall
from inspan.harness.base import Toolbox
from inspan.harness.loop import ANSWER_NOW
from inspan.harness.single import SYSTEM
from inspan.rollout.dispatcher import member_seed
from inspan.tasks.base import Task
from inspan.trace.records import ToolEvent
from inspan.trace.store import TraceStore
from inspan.train.environment import make_environment
from inspan.train.setup import POLICY, Stack, build_stack

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "single.toml"
MEAN_S, SIGMA = 0.05, 1.0  # of a slow tool's time
SAMPLES = 8  # episodes of a task

Tokens = tuple[int, ...]
Turn = Callable[[Sequence["Episode"]], Awaitable[list[Tokens]]]
"""Samples the next turn of some episodes together."""


@dataclass
class Slow:
    """Tools that take their time."""

    tools: Toolbox
    draw: random.Random

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas."""
        return self.tools.schemas

    async def call(self, name: str, arguments: Mapping[str, Any], *, call_id: str, session: str = "") -> str:
        """Sleep, then run the tool."""
        await asyncio.sleep(self.draw.lognormvariate(math.log(MEAN_S) - SIGMA**2 / 2, SIGMA))
        return await self.tools.call(name, arguments, call_id=call_id, session=session)


class Bench:
    """What all sides share. `slow`: tools take their time."""

    def __init__(self, threads: int, tasks: int) -> None:
        self.threads, self.slow = threads, False
        self.recipe = load(RECIPE, [f"engine.threads={threads}"])
        self.environment = make_environment(self.recipe)
        self.tasks = self.environment.train[:tasks]
        self.warm_up = self.environment.train[-4:]

    def stack(self, store: TraceStore | None = None) -> Stack:
        """A fresh engine and gateway."""
        return build_stack(self.recipe, self.environment, store)

    def make_tools(self, task: Task, seed: int, record: Callable[[ToolEvent], None]) -> Toolbox | None:
        """The tools of one episode."""
        tools = self.environment.make_tools(task, seed, record)
        return Slow(tools, random.Random(seed)) if self.slow and tools else tools


class Episode:
    """One episode without harness and gateway: the same messages, tools and limits as the `single` harness."""

    def __init__(self, stack: Stack, task: Task, seed: int, tools: Toolbox) -> None:
        self.seed, self.turns, self.sampled, self.done = seed, 0, 0, False
        self._renderer = stack.gateway._scribe.renderer
        self._tools, self._budget = tools, stack.recipe.limits.critical_steps
        self._room = stack.engine.context_length
        self._spent, self._last = 0, False
        self._after = "context"
        system = {"role": "system", "content": SYSTEM, "tools": tools.schemas}
        self.context: Tokens = ()
        self._say(system)
        self._say({"role": "user", "content": task.prompt})
        self._open()

    def take(self, tokens: Tokens) -> list[ParsedCall]:
        """A sampled turn; the tool calls that it makes, none when it is the last."""
        self.turns += 1
        self.sampled += len(tokens)
        self.context += tokens
        self._after = "stopped" if tokens[-1] in self._renderer.stop_ids else "cut"
        calls = [call for call in self._renderer.parse_text(self._renderer.decode(tokens)).calls if call.name]
        self.done = self._last or not calls
        return [] if self.done else calls

    async def use(self, calls: Sequence[ParsedCall]) -> None:
        """Run tool calls side by side, and go on to the next turn."""
        texts = await asyncio.gather(*(self._run(call) for call in calls))
        self._spent += max(1, len(calls))
        for text in texts:
            self._say({"role": "tool", "content": text})
        if self._budget is not None and self._spent + 1 >= self._budget:
            self._last = True
            self._say({"role": "user", "content": ANSWER_NOW})
        self._open()
        self.done = len(self.context) >= self._room

    async def _run(self, call: ParsedCall) -> str:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return "error: arguments are not a JSON object"
        return await self._tools.call(call.name, arguments, call_id="")

    def _say(self, message: dict[str, Any]) -> None:
        self.context += self._renderer.context(message, after=self._after)
        self._after = "context"

    def _open(self) -> None:
        self.context += self._renderer.opening(after=self._after)


def make_episodes(bench: Bench, stack: Stack, tasks: Sequence[Task], samples: int) -> list[Episode]:
    """The episodes that the dispatcher would open, with its seeds."""
    out = []
    for task in tasks:
        for member in range(samples):
            seed = member_seed(0, task.id, 0, member)
            tools = bench.make_tools(task, seed, lambda _: None)
            assert tools is not None
            out.append(Episode(stack, task, seed, tools))
    return out


# ---- the sides --------------------------------------------------------------------------------------------------


async def free_running(episodes: Sequence[Episode], turn: Turn) -> None:
    """Each episode goes on as soon as its own tools have answered."""

    async def play(episode: Episode) -> None:
        while not episode.done:
            calls = episode.take((await turn([episode]))[0])
            if calls:
                await episode.use(calls)

    await asyncio.gather(*map(play, episodes))


async def lock_step(episodes: Sequence[Episode], turn: Turn) -> None:
    """All episodes sample a turn together; then all tools run; then the next round."""
    while live := [episode for episode in episodes if not episode.done]:
        calls = [episode.take(tokens) for episode, tokens in zip(live, await turn(live), strict=True)]
        await asyncio.gather(*(e.use(made) for e, made in zip(live, calls, strict=True) if made))


def on_engine(stack: Stack, *, reuse: bool) -> Turn:
    """Turns sampled by our engine, with its prefix cache or without."""
    engine, sampling = stack.engine, stack.recipe.sampling

    async def one(episode: Episode) -> Tokens:
        key = f"{episode.seed} {episode.turns}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        most = min(sampling.max_tokens, engine.context_length - len(episode.context))
        params = SamplingParams(most, sampling.temperature, stop_ids=stack.gateway._scribe.renderer.stop_ids, seed=seed)
        return (await engine.sample(POLICY, episode.context, params)).tokens

    async def turn(episodes: Sequence[Episode]) -> list[Tokens]:
        if not reuse:
            engine._lanes[POLICY].reset()
        return list(await asyncio.gather(*map(one, episodes)))

    return turn


def on_generate(stack: Stack) -> Turn:
    """Turns sampled by `transformers.generate`, whole conversations padded on the left."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    net: Any = AutoModelForCausalLM.from_pretrained(stack.directory, dtype=torch.float32).eval()
    stop = stack.gateway._scribe.renderer.stop_ids[0]
    sampling, context = stack.recipe.sampling, stack.engine.context_length

    async def turn(episodes: Sequence[Episode]) -> list[Tokens]:
        lengths = [len(episode.context) for episode in episodes]
        width = max(lengths)
        ids = torch.tensor([[stop] * (width - n) + list(e.context) for n, e in zip(lengths, episodes, strict=True)])
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
        with torch.inference_mode():
            out = net.generate(
                ids, attention_mask=mask, do_sample=True, temperature=sampling.temperature, top_k=0, top_p=1.0,
                max_new_tokens=sampling.max_tokens, eos_token_id=stop, pad_token_id=stop,
            )  # fmt: skip
        rows = out[:, width:].tolist()
        return [_until(row[: context - n], stop) for row, n in zip(rows, lengths, strict=True)]

    return turn


def _until(row: list[int], stop: int) -> Tokens:
    return tuple(row[: row.index(stop) + 1] if stop in row else row)
