"""The search agent of Context-1: given a question, a ranked list of the chunks that support its answer.

It searches, and prunes what it does not need, under a budget of tokens (`[search]` of the recipe). It does not answer
the question: its answer is a line `why [chunk-id]` for each chunk, the best first. Works against any OpenAI-compatible
server. `search` is the same agent as a part of another one: a sub-agent speaks in a role of its own and on behalf of
its parent's tool call.
"""

from __future__ import annotations

from inspan.config.search import Search
from inspan.harness.base import Context
from inspan.harness.loop import Agent, connect, requests_of
from inspan.harness.search.budget import Budget
from inspan.harness.search.corpus_tools import CorpusTools
from inspan.harness.search.session import PRUNE_NAME, SearchSession
from inspan.harness.search.tokens import counter
from inspan.tasks.base import Task

SYSTEM = (
    "You find the chunks of a corpus that support the answer to a question; you do not answer it yourself. Search, "
    "follow up what you find, and prune chunks that are not needed: your context is limited. When every step of the "
    "question is supported, answer with one line for each supporting chunk, the best first: `why [chunk-id]`."
)
PRUNE = {
    "type": "function",
    "function": {
        "name": PRUNE_NAME,
        "description": "Remove chunks from view for good; they are not shown again.",
        "parameters": {
            "type": "object",
            "properties": {
                "chunk_ids": {"type": "array", "items": {"type": "string"}, "description": "ids of chunks in view"}
            },
            "required": ["chunk_ids"],
        },
    },
}
TOOLS = (PRUNE,)
"""What the agent is offered beside the corpus's tools."""
DEFAULT_CONTEXT = 32768
"""The limit when nobody gives one: Context-1's [C]."""


async def run(task: Task, ctx: Context) -> str:
    """The ranked list for one task."""
    answer, _ = await search(task.prompt, ctx, budget=ctx.budget)
    return answer


async def search(
    question: str, ctx: Context, *, role: str = "main", parent_call: str | None = None, budget: int | None = None
) -> tuple[str, int]:
    """The ranked list for a question, and the critical steps that it took, at most `budget`.

    `ctx.options` may hold `search` (a `Search` section), `tokenizer` (the path of the model's tokenizer.json) and
    `system`. Raises TypeError when `ctx.tools` are not those of a corpus.
    """
    if not isinstance(ctx.tools, CorpusTools):
        raise TypeError(f"the search agent needs the tools of a corpus, not {type(ctx.tools).__name__}")
    options = ctx.options
    section = options.get("search") or Search()
    limits = section.scaled(section.limit or DEFAULT_CONTEXT)
    session = SearchSession(
        question,
        str(options.get("system", SYSTEM)),
        ctx.tools,
        Budget(limits),
        counter(options.get("tokenizer")),
        steps=budget,
        name=parent_call or "",
    )
    endpoint = ctx.model(role)
    schemas = [*ctx.tools.schemas, *(TOOLS if limits.prune else ())]
    agent = Agent(connect(endpoint), endpoint.name, [], schemas, ctx.max_tokens, parent_call)
    while True:
        agent.messages, agent.max_tokens = session.prompt(), session.room(ctx.max_tokens)
        reply = await agent.turn()
        answer = session.take(dict(reply), requests_of(reply))
        if answer is not None:
            return answer, session.spent
