"""Finding the harness that a recipe names, and saying what is wrong with it."""

from __future__ import annotations

import pytest

from inspan.errors import RecipeError
from inspan.rollout.load import load_harness

AGENT = """
async def run(task, ctx):
    return "async"

def plain(task, ctx, extra=None):
    return "plain"

def short(task):
    return "too few"

def yields(task, ctx):
    yield "no"

class Agent:
    def run(self, task, ctx):
        return "method"

agent = Agent()
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"agent_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(AGENT)
    return name


def test_functions_in_the_working_directory_are_found_and_run_off_the_loop(folder):
    loaded = load_harness(f"{folder}:plain")
    assert loaded.run(None, None) == "plain" and not loaded.on_loop
    assert len(loaded.version) == 12
    assert load_harness(f"{folder}:agent").run(None, None) == "method"


def test_built_in_agents_share_the_loop_and_have_a_version():
    for name in ("swarm", "single"):
        loaded = load_harness(name)
        assert loaded.on_loop and loaded.version != "unknown"


def test_an_object_or_function_can_be_given_itself():
    def mine(task, ctx):
        return "given"

    assert load_harness(mine).run(None, None) == "given"
    assert load_harness(mine).name.endswith("mine")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("short", r"cannot be called as run\(task, ctx\)"),
        ("yields", "must return"),
        ("number", "is a int, not a function"),
        ("Agent", "is a class"),
        ("plane", "plain"),
    ],
)
def test_what_cannot_be_a_harness_is_refused(folder, what, message):
    with pytest.raises(RecipeError, match=message):
        load_harness(f"{folder}:{what}")


def test_a_missing_module_is_named():
    with pytest.raises(RecipeError, match="nowhere_at_all"):
        load_harness("nowhere_at_all:run")


def test_the_version_follows_the_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    versions = set()
    for index, body in enumerate(["return 'a'", "return 'b'"]):
        (tmp_path / f"ver_{tmp_path.name}_{index}.py".replace("-", "_")).write_text(
            f"def run(task, ctx):\n    {body}\n"
        )
        versions.add(load_harness(f"ver_{tmp_path.name}_{index}:run".replace("-", "_")).version)
    assert len(versions) == 2


def test_a_module_that_exits_when_it_is_imported_is_named(folder, tmp_path):
    (tmp_path / f"{folder}_script.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(RecipeError, match="SystemExit"):
        load_harness(f"{folder}_script:run")
