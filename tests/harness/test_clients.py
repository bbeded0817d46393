"""Unmodified agents of others, run for real against the gateway on Qwen's tokenizer: tool call, result, answer.

Installed by `make clients`; where one is not installed its tests are skipped and say so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from inspan.config import load
from inspan.engine.base import SamplingParams
from inspan.engine.scripted import ScriptedEngine
from inspan.errors import ModelError, ParityError, RecipeError
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML, format_call
from inspan.rollout.load import load_harness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.load import load_tasks
from inspan.trace.chains import trained_chains
from inspan.trace.records import Terminal
from inspan.train import evaluate, run
from inspan.train.probe import qwen_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from starting import Silent

RECIPES = Path(__file__).parents[2] / "recipes" / "clients"
PACKAGES = {"openai-agents": "agents", "pydantic-ai": "pydantic_ai"}
CALLS = {  # how each client's own tool is called: its name in the tool list, and the arguments
    "bash": lambda command: {"command": command},
    "shell": lambda command: {"command": command},
    "Bash": lambda command: {"command": command, "description": "look"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
}


def tool_of(prompt: str) -> str:
    names = re.findall(r'"name": ?"(\w+)"', prompt)
    return next(name for name in names if name in CALLS)


def play(prompt: str) -> str:
    """Looks at the file, then says what it found; mini-swe-agent submits by a command."""
    tool = tool_of(prompt)
    submits = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt
    turn = prompt.count("<|im_start|>assistant")
    if turn == 1:
        return "I count the lines.\n" + format_call(tool, json.dumps(CALLS[tool]("wc -l < data.txt")))
    if submits:
        done = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; wc -l < data.txt"
        return format_call(tool, json.dumps(CALLS[tool](done)))
    return "3"


async def roll_out(name: str, settings: list[str]):
    recipe = load(RECIPES / f"{name}.toml", settings)
    try:
        harness, tokenizer = load_harness("command", command=recipe.command), qwen_tokenizer()
    except (RecipeError, ModelError) as error:
        pytest.skip(str(error))
    venv = Path(recipe.command.path[0]).parent
    if name in PACKAGES and not any(venv.glob(f"lib/*/site-packages/{PACKAGES[name]}")):
        pytest.skip(f"{name} is not installed: {recipe.command.install}")
    renderer = ChatML(tokenizer)
    end = tokenizer.token_to_id("<|im_end|>")
    engine = ScriptedEngine(
        lambda policy, prompt: [*tokenizer.encode(play(tokenizer.decode(prompt, skip_special_tokens=False))).ids, end],
        context_length=131_072,
    )
    runner = Runner(
        Gateway(engine, renderer), harness, [Role("main", "policy", True)], Limits(critical_steps=None, calls=12),
        SamplingParams(400), 100.0,
    )  # fmt: skip
    task = next(task for task in load_tasks(str(RECIPES / "tasks.jsonl")) if task.id == "lines")
    try:
        return engine, await runner.run(RolloutJob("g000000.0", task, "g000000", 0, 0, 11))
    finally:
        await runner.close()


@pytest.mark.external
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("mini-swe-agent", {}),
        *(
            ("openai-agents", {"DIALECT": dialect, "STREAM": stream})
            for dialect in ("chat", "responses")
            for stream in ("", "1")
        ),
        *(
            ("pydantic-ai", {"DIALECT": dialect, "STREAM": stream})
            for dialect in ("chat", "responses", "messages")
            for stream in ("", "1")
        ),
        ("codex", {}),
        ("pi", {}),
        ("claude-code", {}),
    ],
)
async def test_a_client_calls_its_tool_answers_and_is_trained_token_for_token(name, env):
    engine, rollout = await roll_out(name, [f'command.env.{key}="{value}"' for key, value in env.items()])
    assert rollout.terminal is Terminal.COMPLETED, rollout.error
    assert rollout.answer.strip().endswith("3")
    assert [node.fork for node in rollout.nodes if node.fork] == []
    assert rollout.complete and len(rollout.calls) == len(engine.heard)
    trained = sum(sum(chain.trained) for chain in trained_chains(rollout))
    assert trained == sum(call.completion_tokens for call in rollout.calls)
    assert any("3" in str(node.message["content"]) for node in rollout.nodes if node.message["role"] == "tool")


@pytest.mark.external
@pytest.mark.parametrize("name", ["mini-swe-agent", "pi"])
def test_a_policy_is_trained_through_a_client_and_every_invariant_holds(name, tmp_path):
    settings = ["train.updates=1", "train.groups=1", "train.group_size=2", "eval.tasks=1", "sampling.max_tokens=24"]
    recipe = load(RECIPES / f"{name}.toml", settings)
    try:
        load_harness("command", command=recipe.command)
        summary = run(recipe, out=tmp_path, resume=False, progress=Silent(), verify=True)
    except (RecipeError, ModelError) as error:
        pytest.skip(str(error))
    assert summary["verified"]["rollouts"] == 2 + 2 and summary["verified"]["logprobs"] > 0
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["scored"], row["failed"], row["delivered_fraction"], row["unexplained_tokens"]) == (2, 0.0, 1.0, 0)
    kept = json.loads((tmp_path / "fingerprint.json").read_text())
    (face,) = kept["roles"]["main"]
    assert "bash" in {tool.get("function", tool)["name"] for tool in face["tools"]}
    recipe = load(RECIPES / f"{name}.toml", [*settings, 'eval.arms={ trained = { policy = "policy" } }'])
    assert evaluate(recipe, run=tmp_path, progress=Silent())["fingerprint"] == kept["id"], "the same client, again"
    face["tools"][0]["function"]["description"] = "Another one."
    (tmp_path / "fingerprint.json").write_text(json.dumps(kept))
    with pytest.raises(ParityError, match=r'-  "description": "Another one\."'):
        evaluate(recipe, run=tmp_path, progress=Silent())
