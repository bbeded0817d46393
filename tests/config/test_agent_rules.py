"""Rules by which a foreign program's requests find their role."""

from __future__ import annotations

import pytest

from inspan.config import load
from inspan.errors import RecipeError
from inspan.train.setup import roles_at

RECIPE = """
model = "tiny"
harness = "swarm"
[agents.orchestrator]
trainable = true
[agents.subagent]
model = "claude-.*"
system = "{system}"
"""


def test_a_recipes_rules_reach_the_roles(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE.format(system="search agent"))
    roles = roles_at(load(tmp_path / "r.toml").agents, 0.0)
    assert roles[1].fits("claude-small", "You are a search agent.")
    assert not roles[1].fits("gpt", "You are a search agent.") and not roles[0].fits("claude-small", "")


def test_a_broken_expression_is_refused(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE.format(system="search("))
    with pytest.raises(RecipeError, match="no regular expression"):
        load(tmp_path / "r.toml")
