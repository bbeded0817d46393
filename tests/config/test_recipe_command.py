"""The section of outside programs: faults are found when the recipe is read."""

from __future__ import annotations

import pytest

from inspan.config import dump_toml, load
from inspan.errors import RecipeError

RECIPE = 'harness = "command"\n[command]\nargv = ["sh", "-c", "cat {task_file}"]\ntemplate = "t"\npath = ["bin"]\n'


def test_folders_are_relative_to_the_recipe_and_survive_a_resume(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    recipe = load(tmp_path / "r.toml")
    assert recipe.command.folder == str(tmp_path) and recipe.command.template == str(tmp_path / "t")
    assert recipe.command.path == [str(tmp_path / "bin")] and list(recipe.agents) == ["main"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(dump_toml(recipe))
    again = load(tmp_path / "run" / "recipe.toml")
    assert again.command == recipe.command and again.hash() == recipe.hash()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ('env = { A = "{base_urll}" }', "unknown placeholder {base_urll}"),
        ('stdin = "{task:main}"', "unknown placeholder {task:main}"),
        ('answer = "file"', "answer_file"),
        ('answer = "file"\nanswer_file = "../x"', "lies in the workspace"),
        ('files = { "/etc/x" = "" }', "lies in the workspace"),
        ('pick = "first"', "pick"),
        ('pick = "json:"', "pick"),
        ('pick = "regex:("', "regular expression"),
        ('stdin = "a\\u0000"', "NUL"),
        ("argw = []", 'did you mean "command.argv"'),
    ],
)
def test_faults_are_named(tmp_path, more, expected):
    (tmp_path / "r.toml").write_text(RECIPE + more)
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "r.toml")
    assert expected in str(caught.value)


def test_braces_that_are_no_placeholder_stay(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE + "files = { x = '{\"a\": {b}, {}}' }")
    assert load(tmp_path / "r.toml").command.files["x"] == '{"a": {b}, {}}'


def test_a_command_without_a_program_is_refused(tmp_path):
    (tmp_path / "r.toml").write_text('harness = "command"')
    with pytest.raises(RecipeError, match="needs \\[command\\] argv"):
        load(tmp_path / "r.toml")
