"""An agent on pydantic-ai with one tool, as one would ship it: `pydantic_agent.py TASK` prints the answer."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterable

from pydantic_ai import Agent, UsageLimits
from pydantic_ai.models import Model


def model() -> Model:
    """The model, in the dialect that is asked for."""
    name, dialect = os.environ["MODEL"], os.environ.get("DIALECT")
    if dialect == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel(name)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    return OpenAIChatModel(name) if dialect == "chat" else OpenAIResponsesModel(name)


agent = Agent(model(), instructions="You solve small tasks with the shell.")


@agent.tool_plain
def shell(command: str) -> str:
    """Run a shell command in the working directory and return what it prints."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace", timeout=20)
    return (done.stdout + done.stderr)[-4000:] or f"exit code {done.returncode}"


async def listen(context: object, events: AsyncIterable[object]) -> None:
    """Read a stream to its end; that there is a listener makes the model's answers come as streams."""
    async for _ in events:
        pass


async def main() -> None:
    """Answer the task."""
    limits = UsageLimits(request_limit=6)
    handler = listen if os.environ.get("STREAM") else None
    print((await agent.run(sys.argv[1], usage_limits=limits, event_stream_handler=handler)).output)


asyncio.run(main())
