"""Finding the user's own functions by name."""

from __future__ import annotations

import pytest

from inspan.config import load_object
from inspan.errors import RecipeError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_agent_x.py").write_text("def run(task, ctx):\n    return 'hi'\n")
    (tmp_path / "own_broken_x.py").write_text("1 / 0\n")
    (tmp_path / "own_needs_x.py").write_text("import surely_not_installed_x\n")
    return str(tmp_path)


def test_finds_a_function_beside_the_recipe(folder):
    assert load_object("own_agent_x:run", [folder])(None, None) == "hi"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("own_agent_x", "not of the form module:name"),
        ("own_agent_y:run", "no module 'own_agent_y'"),
        ("own_agent_x:rum", 'did you mean "own_agent_x:run"?'),
        ("own_broken_x:run", "ZeroDivisionError: division by zero"),
        ("own_needs_x:run", "imports 'surely_not_installed_x', which is not installed"),
    ],
)
def test_what_is_missing_is_named(folder, spec, expected):
    with pytest.raises(RecipeError) as caught:
        load_object(spec, [folder], what="harness")
    assert expected in str(caught.value)
