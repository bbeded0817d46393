"""The documents say what is: their code runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

from inspan.cli.app import app
from inspan.config import from_dict, load
from inspan.config.reference import reference

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = ("my_agent.py", "my_rewards.py", "my_recipe.toml")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def cases(language: str):
    return [
        pytest.param(page, code, id=f"{page.name}-{index}")
        for page in PAGES
        for index, code in enumerate(blocks(page, language))
    ]


@pytest.mark.parametrize(("page", "code"), cases("python"))
def test_python_in_the_documents_runs(page, code):
    exec(compile(code, page.name, "exec"), {"__name__": page.stem})


@pytest.mark.parametrize(("page", "code"), cases("toml"))
def test_recipes_in_the_documents_are_valid(page, code):
    data = tomllib.loads(code)
    assert from_dict({k: v for k, v in data.items() if k not in ("extends", "set")})


@pytest.mark.parametrize(("page", "code"), cases("bash"))
def test_commands_in_the_documents_exist(page, code):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    group = typer.main.get_command(app)
    for line in filter(None, code.splitlines()):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, line
        elif words[0] == "bash":
            assert (ROOT / words[1]).is_file(), line
        else:
            assert words[0] == "inspan", line
            command = group.commands[words[1]]  # type: ignore[attr-defined]
            command.make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_reference_of_recipes_is_current():
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("**/*.toml")), ids=lambda p: p.stem)
def test_recipes_that_ship_are_valid(path):
    if "base" not in path.parts:
        assert load(path)


def readme_example(folder: Path) -> Path:
    """Write the README's own agent, reward, tasks and recipe into a folder; returns the recipe."""
    page = ROOT / "README.md"
    for name in EXAMPLE:
        language = {".py": "python", ".toml": "toml"}[Path(name).suffix]
        (code,) = [b for b in blocks(page, language) if b.startswith(f"# {name}\n")]
        (folder / name).write_text(code)
    (folder / "my_tasks.jsonl").write_text(blocks(page, "json")[0])
    return folder / "my_recipe.toml"


def test_the_readmes_example_takes_twenty_lines_or_so(tmp_path):
    readme_example(tmp_path)
    code = [line for name in EXAMPLE[:2] for line in (tmp_path / name).read_text().splitlines() if line.strip()]
    assert len(code) <= 20
    assert all(json.loads(line)["answer"] for line in (tmp_path / "my_tasks.jsonl").read_text().splitlines())


def test_the_tree_in_the_readme_names_every_room():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rooms = {p.name for p in (ROOT / "src" / "inspan").iterdir() if (p / "__init__.py").is_file()}
    assert {room for room in rooms if f" {room}/" not in text} == set()


def test_base_dependencies_stay_few():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(project["dependencies"]) <= 14
    names = {re.split(r"[>=<\[]", d)[0] for d in project["dependencies"]}
    assert {n for n in names if importlib.util.find_spec(n.replace("-", "_")) is None} == set()
