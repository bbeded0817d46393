"""A small gateway with a scripted model, and harnesses that behave and misbehave."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from inspan.engine.base import SamplingParams
from inspan.errors import EngineError
from inspan.gateway.base import Grant, Limits, Role, Trace
from inspan.rollout.load import LoadedHarness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.trace.records import Call, Node, Session

ROLES = (Role("main", "policy", True),)


@dataclass
class Open:
    grant: Grant
    seed: int
    limits: Limits
    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    limit_hit: str | None = None
    fault: str | None = None


class FakeGateway:
    """Answers every call with two tokens at the current version; `fail(rollout, n)` may raise on the n-th call."""

    def __init__(self) -> None:
        self.version = 0
        self.open_rollouts: dict[str, Open] = {}
        self.sealed: list[str] = []
        self.late = 0
        self.fail: Callable[[str, int], None] = lambda rollout, n: None
        self.refuse: Exception | None = None
        self.hold: asyncio.Event | None = None  # when set: calls wait for it
        route = Route("/r/{key}/v1/chat/completions", self._chat, methods=["POST"])
        self.app = Starlette(routes=[route])

    def open(self, rollout, *, roles, limits, seed, sampling, default_role, watch=None):
        if self.refuse:
            raise self.refuse
        key = secrets.token_urlsafe(8)
        assert rollout not in self.open_rollouts and rollout not in self.sealed, f"{rollout} was opened twice"
        self.open_rollouts[rollout] = Open(Grant(rollout, key, f"/r/{key}/v1"), seed, limits)
        return self.open_rollouts[rollout].grant

    def seal(self, rollout):
        done = self.open_rollouts.pop(rollout)
        self.sealed.append(rollout)
        session = [Session("s", "main", "policy", True)]
        return Trace(rollout, session, done.nodes, done.calls, True, done.limit_hit, done.fault)

    async def _chat(self, request: Request) -> JSONResponse:
        key = request.path_params["key"]
        found = next((o for o in self.open_rollouts.values() if o.grant.key == key), None)
        if found is None:
            self.late += 1
            return self._error(403, "sealed")
        try:
            json.loads(await request.body())
        except ValueError:
            return self._error(400, "invalid_json")
        n = len(found.calls)
        if found.limits.calls is not None and n >= found.limits.calls:
            found.limit_hit = "calls"
            return self._error(403, "budget_exhausted")
        if self.hold is not None:
            await self.hold.wait()
        try:
            self.fail(found.grant.rollout, n)
        except EngineError as error:
            found.fault = str(error)
            return self._error(400, "fault")
        message = {"role": "assistant", "content": f"said {n}"}
        node = Node(n, "s", n - 1 if n else None, message, (5, n, 7), 1, (-0.5, -0.25), (self.version,) * 2)
        found.nodes.append(node)
        found.calls.append(Call(f"c{n}", "s", n, None, n, "stop", (), 1, 2))
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "main", "choices": [choice]}
        return JSONResponse(reply | {"usage": usage, "seed": found.seed})

    @staticmethod
    def _error(status: int, code: str) -> JSONResponse:
        return JSONResponse({"error": {"message": code, "type": "x", "code": code}}, status)


async def ask(ctx, client, content="hello"):
    """One model call over whatever the context offers."""
    model = ctx.model("main")
    body = {"model": model.name, "messages": [{"role": "user", "content": content}]}
    reply = await client.post(model.base_url + "/chat/completions", json=body)
    if reply.status_code != 200:
        raise RuntimeError(f"{reply.status_code} {reply.json()['error']['code']}")
    return reply.json()["choices"][0]["message"]["content"]


async def polite(task, ctx):
    """Asks once and answers."""
    return await ask(ctx, ctx.model("main").http_client, task.prompt)


def task(name: str = "t") -> Task:
    return Task(name, f"question {name}", "answer")


def job(name: str = "g000000.0", **fields) -> RolloutJob:
    return RolloutJob(**{"id": name, "task": task(), "group": "g000000", "member": 0, "attempt": 0, "seed": 1} | fields)


def runner(harness=polite, *, gateway=None, on_loop=True, limits=None, **fields) -> Runner:
    """A runner around a fake gateway whose timer never rings, unless given another."""

    async def never(seconds: float) -> None:
        await asyncio.Event().wait()

    loaded = LoadedHarness("test", harness, on_loop, "v", socket=not on_loop)
    defaults = {"roles": ROLES, "sampling": SamplingParams(16), "timeout_s": 60.0, "timer": never}
    return Runner(gateway or FakeGateway(), loaded, limits=limits or Limits(critical_steps=9), **(defaults | fields))
