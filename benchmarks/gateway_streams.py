"""What the gateway adds to streams: 1, 16 and 64 at once over 1k and 32k tokens; and what a turn takes on disk.

    python benchmarks/gateway_streams.py

Each session is a growing conversation whose answers stream. The engine has its answer ready, so all that is timed is
the way there and back. Beside it a bare Starlette app reads the same bodies and streams the same bytes, and the engine
is called alone. The client (raw httpx2) is a process of its own, on the same two cores; rounds of the sides alternate.
Added latency is ours less Starlette's. Then the store: bytes a turn of conversations of 10, 100 and 1,000 turns.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from gateway import PAGE, SYSTEM, TOOLS, Instant, direct, make_tokenizer
from inspan.engine.base import SamplingParams
from inspan.gateway.base import Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML
from inspan.gateway.transport import serve
from inspan.trace.store import TraceStore

SAID = "I look it up, page by page, and tell what I find about capitals, currencies and areas. " * 2
TURNS = 4
SIZES, STREAMS = (1_000, 32_000), (1, 16, 64)


class Sides:
    """Both applications, with the requests that each session sends."""

    def __init__(self, folder: Path, tokens: int) -> None:
        self.tokenizer = make_tokenizer()
        self.answer = (*self.ids(SAID), self.tokenizer.token_to_id("<|im_end|>"))
        self.engine = Instant(self.answer)
        self.store = TraceStore(folder / f"{tokens}.db")
        self.gateway = Gateway(self.engine, ChatML(self.tokenizer), store=self.store, clock=lambda: 1.7e9)
        self.requests = self._talk(tokens)
        self.pieces: list[bytes] = []
        self._opened = 0
        self.bare = Starlette(routes=[Route("/r/{key}/v1/chat/completions", self._stream, methods=["POST"])])

    def ids(self, text: str) -> list[int]:
        """Ids of a text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _talk(self, tokens: int) -> list[bytes]:
        """The bodies of a conversation of TURNS turns that begins with so many tokens."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        page, length = len(self.ids(PAGE)), 0
        while length < tokens:
            count = max(1, min(8, (tokens - length) // page))
            messages.append({"role": "user", "content": f"{len(messages)}: " + PAGE * count})
            messages.append({"role": "assistant", "content": "Noted."})
            length += page * count
        bodies = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"Question {turn}: which of them has the largest area?"})
            body = {"model": "main", "messages": messages, "tools": TOOLS, "stream": True}
            bodies.append(json.dumps(body).encode())
            messages.append({"role": "assistant", "content": SAID.strip()})
        return bodies

    async def _stream(self, request: Request) -> StreamingResponse:
        await request.body()

        async def pieces() -> Any:
            for piece in self.pieces:
                yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def open(self, count: int) -> list[str]:
        """Base paths of so many new sessions."""
        roles = [Role("main", "policy", True)]
        self._opened += count
        return [
            self.gateway.open(str(at), roles=roles, seed=at).base_path
            for at in range(self._opened - count, self._opened)
        ]

    def seal(self, count: int) -> None:
        """Seal the last sessions."""
        for at in range(self._opened - count, self._opened):
            self.gateway.seal(str(at))


async def play(client: httpx2.AsyncClient, bases: Sequence[str], bodies: Sequence[bytes]) -> list[list[float]]:
    """All sessions at once; for each request the seconds until its first byte and until its last."""
    found: list[list[float]] = []

    async def session(base: str) -> None:
        for body in bodies:
            begun, first = time.perf_counter(), 0.0
            headers = {"content-type": "application/json"}
            async with client.stream("POST", base + "/chat/completions", content=body, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    first = first or time.perf_counter() - begun
            found.append([first, time.perf_counter() - begun])

    await asyncio.gather(*(session(base) for base in bases))
    return found


async def client_process() -> None:
    """A line of JSON in (where to send what), a line of JSON out (the times, and how long it all took)."""
    async with httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None)) as client:
        for line in sys.stdin:
            order = json.loads(line)
            begun = time.perf_counter()
            found = await play(client, order["bases"], [body.encode() for body in order["bodies"]])
            print(json.dumps({"found": found, "seconds": time.perf_counter() - begun}), flush=True)


async def measure(
    process: asyncio.subprocess.Process, sides: Sides, streams: int, rounds: int
) -> list[dict[str, float]]:
    """Rounds of ours and of Starlette's in turn: p50 and p99 in ms, requests a second."""
    assert process.stdin is not None and process.stdout is not None
    bodies = [body.decode() for body in sides.requests]
    times: list[list[list[float]]] = [[], []]
    seconds = [0.0, 0.0]
    async with serve(sides.gateway.app) as ours, serve(sides.bare) as bare:
        for turn in range(rounds + 1):
            for at, url in enumerate((ours, bare)):
                paths = sides.open(streams) if at == 0 else [f"/r/{i:032}/v1" for i in range(streams)]
                order = {"bases": [url + path for path in paths], "bodies": bodies}
                process.stdin.write(json.dumps(order).encode() + b"\n")
                told = json.loads(await process.stdout.readline())
                if at == 0:
                    sides.seal(streams)
                if turn:  # the first round warms up
                    times[at] += told["found"]
                    seconds[at] += told["seconds"]
    return [
        {
            "p50": percentile([whole for _, whole in one], 50),
            "p99": percentile([whole for _, whole in one], 99),
            "first": percentile([first for first, _ in one], 50),
            "rate": len(one) / spent,
        }
        for one, spent in zip(times, seconds, strict=True)
    ]


def percentile(seconds: Sequence[float], share: int) -> float:
    """A percentile in ms."""
    if len(seconds) < 2:
        return seconds[0] * 1e3
    return statistics.quantiles(seconds, n=100, method="inclusive")[share - 1] * 1e3


async def engine_alone(sides: Sides, prompt: int) -> float:
    """The p50 of the engine called directly, in ms."""
    tokens, params = tuple(range(prompt)), SamplingParams(512)
    found = []
    for _ in range(200):
        begun = time.perf_counter()
        await sides.engine.sample("policy", tokens, params)
        found.append(time.perf_counter() - begun)
    return statistics.median(found) * 1e3


async def streams(folder: Path, rounds: int) -> None:
    """The rows of the streams."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=PIPE, stdout=PIPE, limit=1 << 26
    )
    for size in SIZES:
        sides = Sides(folder, size)
        sides.pieces = await pieces_of(sides)
        alone = await engine_alone(sides, size)
        for count in STREAMS:
            ours, bare = await measure(process, sides, count, max(2, rounds // count))
            row = {
                "what": f"{count} streams, {size // 1000}k tokens: p50",
                "ours": ours["p50"],
                "peer": bare["p50"],
                "ratio": ours["p50"] / bare["p50"],
                "unit": "ms",
                **{f"added_{key}": ours[key] - bare[key] for key in ("p50", "p99", "first")},
                "requests_per_s": ours["rate"],
                "peer_requests_per_s": bare["rate"],
                "engine_alone": alone,
            }
            row = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
            print(json.dumps(row), flush=True)
        sides.store.close()
    assert process.stdin is not None
    process.stdin.close()
    await process.wait()


async def pieces_of(sides: Sides) -> list[bytes]:
    """The events of one answer, as Starlette is to send them."""
    (base,) = sides.open(1)
    whole = await direct(sides.gateway.app)(base + "/chat/completions", sides.requests[0])
    sides.seal(1)
    return [event + b"\n\n" for event in whole.split(b"\n\n") if event]


async def storage(folder: Path) -> None:
    """Bytes a turn, whose messages are of equal length, of conversations that differ in length."""
    rows = []
    for turns in (10, 100, 1000):
        path = folder / f"turns-{turns}.db"
        store = TraceStore(path)
        tokenizer = make_tokenizer()
        answer = (*tokenizer.encode(SAID, add_special_tokens=False).ids, tokenizer.token_to_id("<|im_end|>"))
        gateway = Gateway(Instant(answer), ChatML(tokenizer), store=store)
        base = gateway.open("r", roles=[Role("main", "policy", True)]).base_path
        post = direct(gateway.app)
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn:5}: {PAGE}"})
            await post(base + "/chat/completions", json.dumps({"model": "main", "messages": messages}).encode())
            messages.append({"role": "assistant", "content": SAID.strip()})
        gateway.seal("r")
        store.close()
        rows.append({"turns": turns, "bytes": path.stat().st_size, "bytes_per_turn": path.stat().st_size / turns})
    ours, peer = rows[2]["bytes_per_turn"], rows[1]["bytes_per_turn"]
    row = {"what": "store, bytes a turn at 1,000 turns against 100", "ours": round(ours), "peer": round(peer)}
    print(json.dumps(row | {"ratio": round(ours / peer, 3), "unit": "bytes", "table": rows}), flush=True)


async def main(rounds: int) -> None:
    """Run both."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        await streams(Path(folder), rounds)
        await storage(Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Streams through the gateway, and the store's growth.")
    parser.add_argument("--rounds", type=int, default=48, help="rounds of each side with one stream")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(client_process() if options.client else main(options.rounds))
