"""What the gateway costs: 16 sessions of tool-using turns against a bare Starlette app that answers the same bytes.

    python benchmarks/gateway.py

Both apps get the same requests and give the same replies; ours also parses, matches, renders, "samples" (an engine that
answers at once), reads back, and commits to a store (WAL, synchronous=NORMAL) on a real disk. Over loopback the client
(raw httpx2) is a process of its own, as harnesses behind a socket are; the rows are the p50 and the CPU time of the
server. Then the CPU time of a call over the in-process transport (client included), and where our own time goes. Rounds
of the two alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from inspan.engine.base import Sample
from inspan.gateway import exchange as gateway_exchange
from inspan.gateway.app import CANCELS
from inspan.gateway.base import Limits, Role
from inspan.gateway.dialects.chat import Chat
from inspan.gateway.gateway import Gateway
from inspan.gateway.live import LiveRollout
from inspan.gateway.render import ChatML
from inspan.gateway.transport import IN_PROCESS_URL, in_process_client, serve
from inspan.trace.store import TraceStore

SESSIONS, TURNS = 16, 10
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} pages of the corpus", "parameters": {
        "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}
    for name in ("search", "read", "create_subagent", "assign_task")
]  # fmt: skip
SYSTEM = "You look up facts about countries and answer with a table. Use the tools; do not guess. " * 3
PAGE = (
    "Burkina Faso: capital Ouagadougou; currency XOF; area 274,200; population 19,751,535; neighbours Mali, Niger. " * 4
)
WROTE = (
    'I look it up.\n<tool_call>\n{"name": "search", "arguments": {"query": "capital of Burkina Faso"}}\n</tool_call>'
)

Post = Callable[[str, bytes], Awaitable[bytes]]
Play = Callable[[Sequence[str]], Awaitable[list[float]]]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of 800 ids, trained on the texts of this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([SYSTEM, PAGE, WROTE, json.dumps(TOOLS)], trainer)
    return tokenizer


class Instant:
    """An engine that has its answer ready."""

    context_length = 1 << 20

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._sample = Sample(tokens, (-0.1,) * len(tokens), (0,) * len(tokens), "stop")

    async def sample(self, policy: str, prompt: tuple[int, ...], params: Any, watch: Any = None) -> Sample:
        """The answer."""
        return self._sample

    async def load(self, policy: str, weights: Any) -> None:
        """Nothing to load."""

    def version(self, policy: str) -> int:
        """Always 0."""
        return 0

    async def close(self) -> None:
        """Nothing to close."""


class Ours:
    """The gateway; each round opens rollouts of its own, in one store."""

    def __init__(self, folder: Path) -> None:
        tokenizer = make_tokenizer()
        tokens = (*tokenizer.encode(WROTE, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>"))
        self.store = TraceStore(folder / "traces.db")
        self.gateway = Gateway(Instant(tokens), ChatML(tokenizer), store=self.store, clock=lambda: 1.7e9)
        self._round = 0

    def open(self) -> list[str]:
        """Open a rollout for each session; their base paths."""
        self._round += 1
        limits = Limits(critical_steps=500, tokens=100_000, calls=1000, width=16)
        roles = [Role("main", "policy", True)]
        names = [f"{self._round}-{i}" for i in range(SESSIONS)]
        return [self.gateway.open(name, roles=roles, limits=limits, seed=i).base_path for i, name in enumerate(names)]

    def seal(self) -> None:
        """Seal the rollouts of the round."""
        for i in range(SESSIONS):
            self.gateway.seal(f"{self._round}-{i}")


class Bare:
    """A Starlette app that reads the body and answers the recorded bytes."""

    def __init__(self, replies: list[list[bytes]]) -> None:
        self._replies = replies
        self._turn = [0] * SESSIONS
        self.app = Starlette(routes=[Route("/r/{key}/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        await request.body()
        session = int(request.path_params["key"])
        turn = self._turn[session]
        self._turn[session] = (turn + 1) % TURNS
        return Response(self._replies[session][turn], media_type="application/json")

    def open(self) -> list[str]:
        """The base paths of the sessions: as long as ours, since clients check every character of a URL."""
        return [f"/r/{i:032}/v1" for i in range(SESSIONS)]

    def seal(self) -> None:
        """Nothing to seal."""


async def converse(post: Post, base: str) -> tuple[list[bytes], list[bytes]]:
    """One session as a harness would run it: the requests and the replies."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which?"}]
    requests, replies = [], []
    for turn in range(TURNS):
        requests.append(json.dumps({"model": "main", "messages": messages, "tools": TOOLS}).encode())
        replies.append(await post(base + "/chat/completions", requests[-1]))
        message = json.loads(replies[-1])["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": f"{turn}: {PAGE}"} for c in message["tool_calls"]
        ]
        messages = [*messages, message, *results]
    return requests, replies


async def play(bases: Sequence[str], post: Post, requests: list[list[bytes]]) -> list[float]:
    """All sessions at once, each turn after the other; seconds of each call."""
    latencies: list[float] = []

    async def session(base: str, bodies: list[bytes]) -> None:
        for body in bodies:
            begun = time.perf_counter()
            await post(base + "/chat/completions", body)
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(session(base, bodies) for base, bodies in zip(bases, requests, strict=True)))
    return latencies


async def client_process() -> None:
    """The client's process: a line of JSON in (where to send what), a line of JSON out (seconds of each call)."""
    clients: dict[str, httpx2.AsyncClient] = {}
    requests: list[list[bytes]] = []
    for line in sys.stdin:
        order = json.loads(line)
        requests = [[body.encode() for body in bodies] for bodies in order["requests"]] or requests
        client = clients.setdefault(order["url"], httpx2.AsyncClient(timeout=None))
        print(json.dumps(await play(order["bases"], over_client(client, order["url"]), requests)), flush=True)


class OtherProcess:
    """Has rounds played by a client in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, requests: list[list[bytes]]) -> None:
        self._process = process
        self._requests = [[body.decode() for body in bodies] for bodies in requests]

    async def play(self, url: str, bases: Sequence[str]) -> list[float]:
        """One round; seconds of each call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"url": url, "bases": bases, "requests": self._requests}
        self._requests = []  # it has them
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())


def direct(app: Any) -> Post:
    """Raw ASGI calls."""

    async def post(path: str, body: bytes) -> bytes:
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            parts.append(message.get("body", b""))

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("x", 80),
            "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
            "extensions": {CANCELS: {}},
        }  # fmt: skip
        await app(scope, receive, send)
        return b"".join(parts)

    return post


def over_client(client: httpx2.AsyncClient, url: str) -> Post:
    """Raw httpx2 calls."""

    async def post(path: str, body: bytes) -> bytes:
        answer = await client.post(url + path, content=body, headers={"content-type": "application/json"})
        return answer.content

    return post


async def compare(sides: Sequence[tuple[Ours | Bare, Play]], rounds: int) -> tuple[list[float], list[float]]:
    """Alternate rounds of the two: the p50 of each in ms, and this process's CPU time of a call in µs (best round)."""
    latencies: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for at, (side, round_) in enumerate(sides):
            begun = time.process_time()
            found = await round_(side.open())
            took = time.process_time() - begun
            side.seal()
            if turn:  # the first round warms up
                latencies[at] += found
                cpu[at].append(took / len(found) * 1e6)
    return [statistics.median(one) * 1e3 for one in latencies], [min(one) for one in cpu]


def show(what: str, figures: list[float], unit: str, **more: Any) -> None:
    """Print a row."""
    ours, peer = figures
    row = {"what": what, "ours": round(ours, 3), "peer": round(peer, 3), "ratio": round(ours / peer, 3), "unit": unit}
    print(json.dumps(row | more, ensure_ascii=False), flush=True)


class Stopwatch:
    """Adds up the time in functions, by name; nested time is counted on its own as well."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Time a function in place."""
        plain = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            begun = time.process_time()
            try:
                return plain(*args, **options)
            finally:
                self.spent[label] = self.spent.get(label, 0.0) + time.process_time() - begun

        setattr(owner, name, timed)


async def breakdown(ours: Ours, requests: list[list[bytes]]) -> None:
    """Print where the time of a call goes, one session after the other, without client or socket."""
    watch, post = Stopwatch(), direct(ours.gateway.app)
    watch.wrap(Chat, "parse", "parse the body")
    watch.wrap(gateway_exchange.Exchange, "__init__", "admit, match, render")
    watch.wrap(gateway_exchange.Exchange, "_record", "read back and record")
    watch.wrap(LiveRollout, "turn_seed", "seed")
    watch.wrap(ours.store, "commit_call", "store commit (within: read back and record)")
    watch.wrap(Chat, "encode", "encode the reply")
    calls, begun = 0, time.process_time()
    for _ in range(4):
        for base, bodies in zip(ours.open(), requests, strict=True):
            for body in bodies:
                await post(base + "/chat/completions", body)
                calls += 1
        ours.seal()
    spent = {"whole call": time.process_time() - begun} | watch.spent
    figures = {label: round(seconds / calls * 1e6, 1) for label, seconds in spent.items()}
    print(json.dumps({"what": "gateway, µs per call", "unit": "µs", "parts": figures}, ensure_ascii=False), flush=True)


async def over_loopback(ours: Ours, bare: Bare, requests: list[list[bytes]], rounds: int) -> None:
    """The rows over a socket."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=PIPE, stdout=PIPE, limit=1 << 24
    )
    other = OtherProcess(process, requests)
    async with serve(ours.gateway.app) as url, serve(bare.app) as bare_url:
        p50, cpu = await compare([(ours, partial(other.play, url)), (bare, partial(other.play, bare_url))], rounds)
    show(f"gateway p50 at {SESSIONS} sessions, httpx2 over loopback", p50, "ms", target="<= 1.3")
    show("gateway CPU time of a call, server over loopback", cpu, "µs")
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def main(rounds: int) -> None:
    """Run both comparisons."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        ours = Ours(Path(folder))
        talks = [await converse(direct(ours.gateway.app), base) for base in ours.open()]
        ours.seal()
        requests, replies = [talk[0] for talk in talks], [talk[1] for talk in talks]
        bare = Bare(replies)
        await over_loopback(ours, bare, requests, rounds)
        async with in_process_client(ours.gateway.app) as client, in_process_client(bare.app) as bare_client:
            posts = over_client(client, IN_PROCESS_URL), over_client(bare_client, IN_PROCESS_URL)
            sides = [
                (side, partial(play, post=post, requests=requests))
                for side, post in zip((ours, bare), posts, strict=True)
            ]
            _, cpu = await compare(sides, rounds)
            show("gateway CPU time of a call with its client, httpx2 in-process", cpu, "µs")
        await breakdown(ours, requests)
        ours.store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The gateway against a bare Starlette app.")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each side")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(client_process() if options.client else main(options.rounds))
