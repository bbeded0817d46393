"""What a recipe says of the search agent: budget, tasks, curriculum; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.config import dump_toml, from_dict
from inspan.config.search import PUBLISHED, Search
from inspan.config.toml import dumps
from inspan.errors import RecipeError


def recipe(**sections: Any):
    tasks = {"use": "retrieval", **sections.pop("tasks", {})}
    return from_dict({"harness": "search", "tasks": tasks, "rewards": [{"use": "retrieval"}], **sections})


def test_the_search_agent_has_one_trainable_role_and_the_kinds_of_its_tasks() -> None:
    made = recipe()
    assert made.agents["main"].trainable
    assert set(made.tasks.kinds) == {"hops_1", "hops_2", "hops_3"}
    assert 'use = "retrieval"' in dump_toml(made) and dumps({"limit": 480}) == "limit = 480\n"


def test_the_curriculum_has_phases() -> None:
    made = recipe(tasks={"sampler": "hops", "phases": [[0.5, 1, 2], [1.0, 2, 3]]})
    assert made.tasks.phases == [(0.5, 1, 2), (1.0, 2, 3)]


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"tasks": {"phases": [[1.0, 1, 2]]}}, "sampler"),
        ({"tasks": {"kinds": {"wide": 1.0}}}, "unknown kind of task"),
        ({"tasks": {"corpus": "docs"}}, "bring their own"),
        ({"search": {"soft": 300, "hard": 200}}, "soft may not exceed hard"),
        ({"search": {"limit": 400, "hard": 380, "reserve": 64}}, "nor hard what the reserve leaves"),
        ({"search": {"limits": 4}}, "limit"),
        ({"search": {"limit": -1}}, "search.limit"),
        ({"search": {"candidates": 0}}, "search.candidates"),
    ],
)
def test_what_cannot_be_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        recipe(**sections)


@given(st.integers(64, 10**6), st.integers(0, 10**6))
def test_a_scaled_budget_has_every_number_and_keeps_their_order(context: int, limit: int) -> None:
    if limit > context:
        with pytest.raises(RecipeError):
            Search(limit=limit).scaled(context)
        return
    if 0 < limit < 64:
        return
    scaled = Search(limit=limit).scaled(context)
    assert all(getattr(scaled, name) >= 1 for name in PUBLISHED)
    assert scaled.soft <= scaled.hard <= scaled.limit - scaled.reserve
    assert scaled.per_call_floor <= scaled.per_call <= scaled.limit
    assert scaled.scaled(context) == scaled
