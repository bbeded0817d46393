"""An agent on the OpenAI Agents SDK with one tool, as one would ship it: `openai_agent.py TASK` prints the answer."""

import asyncio
import os
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def shell(command: str) -> str:
    """Run a shell command in the working directory and return what it prints."""
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, errors="replace", timeout=20)
    return (done.stdout + done.stderr)[-4000:] or f"exit code {done.returncode}"


async def main() -> None:
    """Answer the task."""
    set_tracing_disabled(True)
    kind = OpenAIChatCompletionsModel if os.environ.get("DIALECT") == "chat" else OpenAIResponsesModel
    model = kind(os.environ["MODEL"], AsyncOpenAI())
    agent = Agent("worker", instructions="You solve small tasks with the shell.", tools=[shell], model=model)
    if os.environ.get("STREAM"):
        result = Runner.run_streamed(agent, sys.argv[1], max_turns=6)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, sys.argv[1], max_turns=6)
    print(result.final_output)


asyncio.run(main())
