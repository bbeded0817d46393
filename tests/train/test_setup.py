"""The parts of a run: what its fingerprint covers, and budgets that no engine can serve."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path

import pytest

from inspan.config import load
from inspan.errors import ModelError, RecipeError
from inspan.train.environment import make_environment
from inspan.train.setup import Stack, build_stack


def built(project: Path, *settings: str) -> Stack:
    recipe = load(project / "recipe.toml", settings)
    return build_stack(recipe, make_environment(recipe), None)


def test_harnesses_that_differ_only_in_a_tools_description_have_different_fingerprints(project: Path) -> None:
    stack = built(project)
    swarm = stack.harness("swarm")
    tools = copy.deepcopy(swarm.tools)
    tools[0]["function"]["description"] += " Use it wisely."
    ours, theirs = stack.fingerprint(swarm), stack.fingerprint(replace(swarm, tools=tools))
    assert ours.hash != theirs.hash
    assert [line.partition(":")[0] for line in ours.differences(theirs)] == ["tools"]
    asyncio.run(stack.close())


def test_the_fingerprint_covers_the_environments_tools_and_the_system_prompt_in_use(project: Path) -> None:
    (project / "docs").mkdir()
    (project / "docs" / "a.txt").write_text("Niamey is the capital of Niger.")
    settings = [f'tasks.corpus="{project / "docs"}"', 'options.system="Be brief."']
    plain, full = built(project), built(project, *settings)
    bare, rich = (stack.fingerprint(stack.harness("single")) for stack in (plain, full))
    assert bare.tools == () and len(rich.tools) == 2 and rich.system_prompt == "Be brief."
    for stack in (plain, full):
        asyncio.run(stack.close())


def test_a_policy_that_reads_other_tokens_is_refused(project: Path) -> None:
    stack = built(project)

    async def serve() -> None:
        try:
            await stack.ensure("tiny-single")
        finally:
            await stack.close()

    with pytest.raises(ModelError, match="its tokenizer is not that of"):
        asyncio.run(serve())


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("sampling.max_tokens=512", "leaves no room for a prompt"),
        ("engine.context=24", "leaves no room for a prompt"),
        ("engine.context=513", "exceeds the 512 tokens of the model"),
    ],
)
def test_a_budget_that_the_context_cannot_hold_is_refused(project: Path, setting: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        built(project, setting)
