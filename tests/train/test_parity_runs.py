"""A policy is judged and served in its own harness: the same one on another day passes, a changed one is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx2
import pytest
from starting import Silent, start

from inspan.config import Recipe, load
from inspan.errors import InputError
from inspan.stopping import run_until_stopped
from inspan.train import evaluate, parity
from inspan.train.serve import _serve, admin_key

AGENT = '''
import json, pathlib, tempfile, uuid
import openai

HERE = pathlib.Path(__file__).parent
TOOLS = []

def run(task, ctx):
    """An agent of somebody else's: what it tells its model lies in files, and changes a little each time."""
    model = ctx.model("main")
    day, place = (HERE / "day.txt").read_text(), tempfile.mkdtemp()
    system = (HERE / "system.txt").read_text().format(day=day, place=place, id=uuid.uuid4())
    tools = json.loads((HERE / "tools.json").read_text())
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        reply = client.chat.completions.create(model=model.name, messages=messages, tools=tools, max_tokens=8)
    return reply.choices[0].message.content or ""
'''
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"It can {name}.", "parameters": {"type": "object"}}}
    for name in ("look", "walk")
]


@pytest.fixture
def trained(project: Path, tmp_path: Path) -> tuple[Recipe, Path]:
    name = f"agent_{abs(hash(str(project)))}"  # a module's name is known once a process
    (project / f"{name}.py").write_text(AGENT)
    (project / "system.txt").write_text("It is {day}. Work in {place} ({id}).\nUse the tools, and never guess.")
    (project / "day.txt").write_text("2026-11-30")
    (project / "tools.json").write_text(json.dumps(TOOLS))
    recipe = load(project / "recipe.toml", [f'harness="{name}:run"', "train.updates=1"])
    start(recipe, tmp_path / "out")
    return recipe, tmp_path / "out"


def judge(recipe: Recipe, out: Path, **options) -> dict:
    return evaluate(recipe, run=out, progress=Silent(), **options)


def test_what_a_foreign_harness_told_is_kept_with_its_volatile_parts_masked(trained) -> None:
    _, out = trained
    kept = json.loads((out / "fingerprint.json").read_text())
    (way,) = kept["seen"]["main"]
    assert way["system"] == "It is …. Work in … (…).\nUse the tools, and never guess."
    assert [tool["name"] for tool in way["tools"]] == ["look", "walk"]
    assert kept["parts"]["harness"].endswith(":run") and len(kept["hash"]) == 16


def test_the_same_harness_on_another_day_passes(trained, project: Path) -> None:
    recipe, out = trained
    (project / "day.txt").write_text("Tue Dec 01 2026")
    assert judge(recipe, out)["arms"]["trained"]["n"] == 1


def test_a_changed_tool_is_refused_and_the_difference_names_it(trained, project: Path) -> None:
    recipe, out = trained
    changed = json.loads(json.dumps(TOOLS))
    changed[1]["function"]["description"] = "It can run."
    (project / "tools.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="main: tool walk differs") as caught:
        judge(recipe, out)
    assert '- "description": "It can walk."' in str(caught.value) and "It can run." in str(caught.value)
    assert judge(recipe, out, allow_drift=True)["arms"]["trained"]["n"] == 1


def test_a_changed_system_prompt_source_or_limit_is_refused(trained, project: Path) -> None:
    recipe, out = trained
    (project / "system.txt").write_text("It is {day}. Work in {place} ({id}).\nUse the tools, or guess.")
    with pytest.raises(InputError, match="the system prompt differs"):
        judge(recipe, out)
    with pytest.raises(InputError, match=r"limits: .*critical_steps.*against"):
        judge(load(project / "recipe.toml", [f'harness="{recipe.harness}"', "limits.critical_steps=9"]), out)


def test_a_run_is_served_to_its_own_harness_only(trained, tmp_path: Path) -> None:
    recipe, out = trained
    heard = []

    async def visit(line: str, task: asyncio.Task) -> None:
        url, key = line.split()[1], (tmp_path / "gw" / "admin.key").read_text().strip()
        async with httpx2.AsyncClient(timeout=30) as client:
            made = await client.post(f"{url}/admin/v1/rollouts", headers={"authorization": f"Bearer {key}"}, json={})
            own = "It is 2027-01-01. Work in /tmp/zz (0b5e1f3a-9c1d-4f4e-8e5b-0a1b2c3d4e5f)."
            for system in (own, "You are another."):
                content = system + "\nUse the tools, and never guess."
                messages = [{"role": "system", "content": content}, {"role": "user", "content": "say 1"}]
                body = {"messages": messages, "tools": TOOLS, "max_tokens": 4}
                heard.append(await client.post(f"{url}{made.json()['base_path']}/chat/completions", json=body))
        task.cancel()

    async def main() -> None:
        (tmp_path / "gw").mkdir()
        visits = []
        task = asyncio.current_task()
        tell = lambda line: visits.append(asyncio.ensure_future(visit(line, task)))  # noqa: E731
        key = admin_key(tmp_path / "gw", "127.0.0.1")
        try:
            await _serve(recipe, tmp_path / "gw", out, "127.0.0.1", 0, key, tell, parity.load(out))
        except asyncio.CancelledError:
            await asyncio.gather(*visits)

    run_until_stopped(main())
    assert [answer.status_code for answer in heard] == [200, 409]
    assert heard[1].json()["error"]["code"] == "harness_drift"
    assert "the system prompt differs" in heard[1].json()["error"]["message"]
