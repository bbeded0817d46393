"""The agent swarm of Kimi K2.5 (arXiv 2602.02276): an orchestrator with direct tools and sub-agents.

`create_subagent(name, system_prompt)` registers a reusable agent; `assign_task(agent, prompt)` runs it and returns one
message. Assignments of one turn run concurrently, in waves of `width`; `create_subagent` takes effect before them.
A sub-agent works through a session of its own (`X-Parent-Call`), has the direct tools only, and may use the steps that
its parent had left, less the one that the parent needs to answer. Its errors come back as its result. The option
`subagent_temperature` is sent with its requests: a frozen sub-agent has nothing to explore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import openai

from inspan.errors import InspanError, LimitExceeded
from inspan.harness.base import Context
from inspan.harness.loop import Agent, ToolRequest, TurnResult, connect, run_loop
from inspan.harness.single import SYSTEM, run_direct
from inspan.harness.tools import schema
from inspan.tasks.base import Task

CREATE = schema(
    "create_subagent",
    "Register a sub-agent that can be given tasks; it has the search and read tools.",
    name="a short name",
    system_prompt="what the sub-agent is told to be",
)
ASSIGN = schema(
    "assign_task",
    "Give a task to a sub-agent; returns its final message. Several calls in one turn run at the same time.",
    agent="the sub-agent's name",
    prompt="the task",
)
TOOLS = (CREATE, ASSIGN)
"""What the orchestrator is offered beside the environment's tools."""
DEFAULT_WIDTH = 16


@dataclass(slots=True)
class Swarm:
    """The state of one episode: registered sub-agents by name."""

    ctx: Context
    width: int = DEFAULT_WIDTH
    agents: dict[str, str] = field(default_factory=dict)

    async def execute(self, requests: Sequence[ToolRequest], left: int | None) -> TurnResult:
        """One turn of the orchestrator: creations first, then direct tools and assignments side by side."""
        texts: dict[str, str] = {}
        for request in requests:
            if request.name == "create_subagent":
                texts[request.id] = self._create(request)
        assigned: list[ToolRequest] = []
        direct: list[ToolRequest] = []
        for request in requests:
            if request.name == "assign_task":
                error = self._refusal(request)
                if error:
                    texts[request.id] = error
                else:
                    assigned.append(request)
            elif request.id not in texts:
                direct.append(request)
        own = max(1, len(requests) - len(assigned))
        found, steps = await asyncio.gather(
            run_direct(self.ctx.tools, direct),
            self._assign_all(assigned, None if left is None else left - own - 1, texts),
        )
        return TurnResult(texts | found.texts, len(requests) - len(assigned), steps)

    def _create(self, request: ToolRequest) -> str:
        arguments = request.arguments or {}
        name, prompt = arguments.get("name"), arguments.get("system_prompt")
        if not (isinstance(name, str) and name and isinstance(prompt, str)):
            return "error: name and system_prompt must be texts"
        self.agents[name] = prompt
        return f"created {name}"

    def _refusal(self, request: ToolRequest) -> str | None:
        arguments = request.arguments or {}
        agent, prompt = arguments.get("agent"), arguments.get("prompt")
        if not (isinstance(agent, str) and isinstance(prompt, str) and prompt):
            return "error: agent and prompt must be texts"
        return None if agent in self.agents else f"error: no sub-agent {agent}"

    async def _assign_all(self, assigned: Sequence[ToolRequest], left: int | None, texts: dict[str, str]) -> int:
        """Run assignments in waves; returns the critical steps they took: the slowest of each wave, summed."""
        total = 0
        for at in range(0, len(assigned), self.width):
            wave = assigned[at : at + self.width]
            allowance = None if left is None else left - total
            results = await asyncio.gather(*(self._assign(request, allowance) for request in wave))
            texts.update({request.id: text for request, (text, _) in zip(wave, results, strict=True)})
            total += max(steps for _, steps in results)
        return total

    async def _assign(self, request: ToolRequest, allowance: int | None) -> tuple[str, int]:
        if allowance is not None and allowance < 1:
            return "error: no steps left", 0
        arguments = request.arguments or {}
        endpoint = self.ctx.model("subagent")
        messages = [
            {"role": "system", "content": self.agents[arguments["agent"]]},
            {"role": "user", "content": arguments["prompt"]},
        ]
        schemas = self.ctx.tools.schemas if self.ctx.tools else []
        temperature = self.ctx.options.get("subagent_temperature")
        agent = Agent(connect(endpoint), endpoint.name, messages, schemas, self.ctx.max_tokens, request.id, temperature)

        async def execute(requests: Sequence[ToolRequest], left: int | None) -> TurnResult:
            return await run_direct(self.ctx.tools, requests, session=arguments["prompt"])

        try:
            answer, steps = await run_loop(agent, execute, budget=allowance)
        except LimitExceeded:
            return "error: the sub-agent ran out of steps", allowance or 0
        except (openai.APIStatusError, InspanError) as error:
            if isinstance(error, openai.InternalServerError):
                raise
            return f"error: the sub-agent failed: {error}", 0
        return answer or "error: the sub-agent gave no answer", steps


async def run(task: Task, ctx: Context) -> str:
    """Answer one task as the orchestrator of a swarm."""
    endpoint = ctx.model("orchestrator")
    swarm = Swarm(ctx, width=int(ctx.options.get("width", DEFAULT_WIDTH)))
    messages = [{"role": "system", "content": ctx.options.get("system", SYSTEM)}]
    messages.append({"role": "user", "content": task.prompt})
    schemas = [*(ctx.tools.schemas if ctx.tools else []), *TOOLS]
    agent = Agent(connect(endpoint), endpoint.name, messages, schemas, ctx.max_tokens)
    answer, _ = await run_loop(agent, swarm.execute, budget=ctx.budget)
    return answer
