"""A small real tokenizer, scripted engines, and a harness's side of the gateway."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from inspan.engine.base import Sample, SamplingParams, Watch
from inspan.engine.scripted import ScriptedEngine
from inspan.engine.witness import WitnessEngine
from inspan.gateway.base import Limits, Role, Trace
from inspan.gateway.gateway import Gateway
from inspan.gateway.pace import Pace
from inspan.gateway.render import ChatML
from inspan.gateway.transport import IN_PROCESS_URL, in_process_client
from inspan.trace.delivery import delivery
from inspan.trace.records import Node, Rollout, Terminal, Tokens
from inspan.trace.verify import breaches

CORPUS = [
    "hello world, the answer is done. search capital of Zürich 東京 🎉 name arguments tool_call find it yes no"
] * 4
END = "<|im_end|>"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "top": {"type": "integer"}},
            "required": ["query"],
        },
    },
}
SUBAGENT = {"type": "function", "function": {"name": "assign_task", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Find it."}]
MAIN = (Role("main", "policy", True),)
SWARM = (Role("orchestrator", "policy", True), Role("subagent", "policy@v0", False))


@cache
def tokenizer() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    return tok


def ids(text: str, *, end: bool = True) -> list[int]:
    tok = tokenizer()
    return [*tok.encode(text, add_special_tokens=False).ids, *([tok.token_to_id(END)] if end else [])]


def text(tokens: Sequence[int]) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=False)


def call(name: str = "search", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def scripted(*texts: str | Exception, **options: Any) -> ScriptedEngine:
    """An engine that answers with these texts in order; the last text repeats."""

    def replies() -> Iterable[Any]:
        for one in texts:
            yield one if isinstance(one, Exception) else ids(one)
        while True:
            yield ids(str(texts[-1]))

    return ScriptedEngine(replies(), **options)


class SlowEngine:
    """Samples one token each time `step` is released; says when it starts and when it is cancelled."""

    context_length = 4096

    def __init__(self, text: str) -> None:
        self.tokens = ids(text)
        self.step = asyncio.Semaphore(0)
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def sample(self, policy: str, prompt: Tokens, params: SamplingParams, watch: Watch | None = None) -> Sample:
        self.started.set()
        done: list[int] = []
        try:
            for token in self.tokens:
                await self.step.acquire()
                done.append(token)
                if watch is not None and watch([token]):
                    break
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return Sample(tuple(done), (-0.5,) * len(done), (0,) * len(done), "stop")

    def version(self, policy: str) -> int:
        return 0

    async def load(self, policy: str, weights: Any) -> None: ...

    async def close(self) -> None: ...


class Desk:
    """A gateway with one open rollout, and clients to it."""

    def __init__(
        self,
        engine: Any,
        *,
        roles: Sequence[Role] = MAIN,
        limits: Limits | None = None,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        renderer: Any = None,
        rollout: str = "r",
        pace: Pace | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine
        self.witness = WitnessEngine(engine)
        self.gateway = Gateway(self.witness, renderer or ChatML(tokenizer(), compact=True), **options)
        self.rollout = rollout
        self.grant = self.gateway.open(rollout, roles=roles, limits=limits, seed=seed, sampling=sampling, pace=pace)
        self.http = in_process_client(self.gateway.app)
        self.url = IN_PROCESS_URL + self.grant.base_path

    def client(self, *, retries: int = 0, url: str | None = None) -> openai.AsyncOpenAI:
        http = self.http if url is None else None
        key = self.grant.key
        base = self.url if url is None else url + self.grant.base_path
        return openai.AsyncOpenAI(base_url=base, api_key=key, http_client=http, max_retries=retries)

    async def ask(self, messages: Any = ASK, *, parent: str | None = None, model: str = "main", **options: Any) -> Any:
        headers = {"X-Parent-Call": parent} if parent else None
        create: Callable[..., Any] = self.client().chat.completions.create
        return await create(model=model, messages=messages, extra_headers=headers, **options)

    async def post(self, body: Any, path: str = "/chat/completions", **headers: str) -> Any:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fixed = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(self.url + path, content=raw, headers=fixed)

    def seal(self) -> Trace:
        return self.gateway.seal(self.rollout)


def returned(reply: Any, index: int = 0) -> dict[str, Any]:
    """An assistant message as a harness puts it back into its history."""
    return reply.choices[index].message.model_dump(exclude_none=True)


def results(reply: Any, content: str = "found") -> list[dict[str, Any]]:
    """A result for each tool call of a reply."""
    calls = reply.choices[0].message.tool_calls or ()
    return [{"role": "tool", "tool_call_id": one.id, "content": content} for one in calls]


def tokens_of(nodes: Sequence[Node], node: int | None) -> Tokens:
    """All ids from the root to a node."""
    by_id = {one.id: one for one in nodes}
    out: Tokens = ()
    while node is not None:
        out, node = by_id[node].tokens + out, by_id[node].parent
    return out


def heard_until_killed(script: str, store: Path, lines: int) -> list[str]:
    """What a process said before `kill -9`, sent after so many lines: whole lines only. The script gets the store's
    path and this folder as its arguments."""
    command = [sys.executable, "-c", textwrap.dedent(script), str(store), str(Path(__file__).parent)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None
    heard = [victim.stdout.readline() for _ in range(lines)]
    victim.kill()
    heard += [line for line in victim.stdout.readlines() if line.endswith("\n")]
    victim.wait()
    return [line.strip() for line in heard]


def audit(desk: Desk, trace: Trace) -> None:
    """What must hold of any record: it is what the engine gave, each sampled token is trained once, none is lost."""
    rollout = Rollout(
        trace.rollout, None, "", 0, Terminal.COMPLETED, None, trace.sessions, trace.nodes, trace.calls,
        complete=trace.complete,
    )  # fmt: skip
    assert [str(one) for one in breaches(rollout, desk.witness.take(trace.rollout))] == []
    found = delivery(rollout)
    assert found.unexplained == 0 and found.trained == found.sampled - found.excluded.total()
