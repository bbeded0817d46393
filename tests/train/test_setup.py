"""The parts of a run: what its fingerprint covers, and budgets that no engine can serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inspan.config import load
from inspan.errors import ModelError, RecipeError
from inspan.parity.fingerprint import Fingerprint
from inspan.train.environment import make_environment
from inspan.train.setup import Stack, build_stack


def built(project: Path, *settings: str) -> Stack:
    recipe = load(project / "recipe.toml", settings)
    return build_stack(recipe, make_environment(recipe), None)


def test_the_setting_of_a_fingerprint_covers_limits_renderer_and_the_harness_version(project: Path) -> None:
    stacks = [built(project), built(project, "limits.critical_steps=4", "engine.context=256")]
    ours, theirs = (Fingerprint(stack.setting("single")) for stack in stacks)
    assert [line.partition(":")[0] for line in ours.differences(theirs.setting)] == [
        "limits.critical_steps", "limits.context",
    ]  # fmt: skip
    assert ours.id != theirs.id and ours.setting["renderer"]["tokenizer"] and len(ours.setting["version"]) == 12
    for stack in stacks:
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
