"""A single agent with the environment's tools: what the swarm is measured against."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from inspan.harness.base import Context, Toolbox
from inspan.harness.loop import Agent, ToolRequest, TurnResult, connect, run_loop
from inspan.tasks.base import Task

SYSTEM = "You answer questions from a library."


async def run(task: Task, ctx: Context) -> str:
    """Answer one task with direct tool calls only."""
    endpoint = ctx.model("main")
    tools = ctx.tools
    messages = [{"role": "system", "content": ctx.options.get("system", SYSTEM)}]
    messages.append({"role": "user", "content": task.prompt})
    schemas = tools.schemas if tools else []
    agent = Agent(connect(endpoint), endpoint.name, messages, schemas, ctx.max_tokens)

    async def execute(requests: Sequence[ToolRequest], left: int | None) -> TurnResult:
        return await run_direct(tools, requests)

    answer, _ = await run_loop(agent, execute, budget=ctx.budget)
    return answer


async def run_direct(tools: Toolbox | None, requests: Sequence[ToolRequest], session: str = "") -> TurnResult:
    """Run direct tool calls concurrently."""

    async def one(request: ToolRequest) -> str:
        if request.arguments is None:
            return "error: arguments are not a JSON object"
        if tools is None:
            return f"error: no tool {request.name}"
        return await tools.call(request.name, request.arguments, call_id=request.id, session=session)

    texts = await asyncio.gather(*(one(request) for request in requests))
    return TurnResult({r.id: text for r, text in zip(requests, texts, strict=True)}, direct=len(requests))
