"""Parity end to end: a foreign client is trained, judged another day, and refused when it shows something else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starting import Silent, start

from inspan.config import Recipe, load
from inspan.errors import ParityError
from inspan.stopping import run_until_stopped
from inspan.trace.store import TraceStore
from inspan.train import evaluate
from inspan.train.serve import _serve, admin_key

CLIENT = r'''
"""A program that knows nothing of us: its own prompt, two tools, plain HTTP. Its day and its tools are in day.json."""
import json, os, pathlib, sys, time, urllib.error, urllib.request

given = json.loads(pathlib.Path(__file__).with_name("day.json").read_text())
tools = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
    for name, text in given["tools"].items()
]
system = f"You fix bugs.\nToday: {given['today']}\nDirectory: {os.getcwd()}\nMachine: {given['machine']}.{os.getpid()}"
body = {
    "model": "gpt-any", "temperature": 0.3, "tools": tools,
    "messages": [{"role": "system", "content": system}, {"role": "user", "content": sys.argv[1]}],
}
def answered(request):
    while True:  # it does not give up
        try:
            return json.load(urllib.request.urlopen(request))
        except urllib.error.HTTPError:
            time.sleep(0.05)


request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json",
     "user-agent": "fixer/1.2 (linux; x64)"},
)
answer = answered(request)
print(answer["choices"][0]["message"].get("content") or "")
'''
TOOLS = {"run": "Run a command.", "read": "Read a file."}


@pytest.fixture
def client(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program's folder, which is not the recipe's: its version is not known to us."""
    folder = tmp_path_factory.mktemp("client")
    (folder / "fixer.py").write_text(CLIENT)
    on_day(folder)
    return folder


def on_day(folder: Path, today: str = "2026-12-01", machine: str = "box", **tools: str) -> None:
    day = {"today": today, "machine": machine, "tools": TOOLS | tools}
    (folder / "day.json").write_text(json.dumps(day))


def recipe_of(project: Path, client: Path, *settings: str) -> Recipe:
    argv = json.dumps([sys.executable, str(client / "fixer.py"), "{task}"])
    fixed = [
        'harness="command"', f"command.argv={argv}", 'agents={ main = { model = "gpt-.*", trainable = true } }',
        "train.updates=2", "eval.tasks=1",
    ]  # fmt: skip
    return load(project / "recipe.toml", [*fixed, *settings])


def judged(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any]:
    return evaluate(recipe, run=out, progress=Silent(), **options)


def test_a_foreign_client_is_held_to_what_its_training_showed(project: Path, client: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of(project, client), tmp_path / "out"
    summary = start(recipe, out)
    kept = json.loads((out / "fingerprint.json").read_text())
    (face,) = kept["roles"]["main"]
    assert face["system"] == "You fix bugs.\nToday: ⟨date⟩\nDirectory: ⟨path⟩\nMachine: box.⟨…⟩"
    assert [tool["function"]["name"] for tool in face["tools"]] == ["read", "run"]
    assert (face["client"], face["dialect"], face["sampling"]) == ("fixer/1.2", "chat", {"temperature": ["0.3"]})
    assert kept["limits"]["max_tokens"] == 24 and kept["renderer"]["tokenizer"]
    with TraceStore(out / "trace.sqlite") as store:
        carried = {store.load_rollout(row.id).fingerprint for row in store.rollouts() if not row.id.startswith("eval")}
    assert carried <= {kept["id"], *kept["earlier"]} and kept["id"] in carried
    assert summary["fingerprint"] == kept["id"]

    on_day(client, today="2027-02-13")
    assert judged(recipe, out)["fingerprint"] == kept["id"]

    on_day(client, run="Run a shell command.")
    with pytest.raises(ParityError) as refused:
        judged(recipe, out)
    text = str(refused.value)
    assert "role main: tool run changed" in text and '-  "description": "Run a command."' in text
    assert '+  "description": "Run a shell command."' in text and "read" not in text and "system" not in text

    allowed = judged(recipe, out, allow_drift=True)
    assert allowed["fingerprint"] != kept["id"] and "tool run changed" in allowed["drift"][0]


def test_other_limits_and_another_prompt_are_refused(project: Path, tmp_path: Path) -> None:
    recipe, out = load(project / "recipe.toml", ["train.updates=1", "eval.tasks=1"]), tmp_path / "out"
    start(recipe, out)
    for setting, says in (
        ("limits.critical_steps=4", "limits.critical_steps: 3 in training, 4 now"),
        ('options.system="Be bold."', "+Be bold."),
    ):
        with pytest.raises(ParityError, match=says.replace("+", r"\+")):
            judged(load(project / "recipe.toml", ["train.updates=1", "eval.tasks=1", setting]), out)
    (out / "fingerprint.json").unlink()
    with pytest.raises(ParityError, match="has no fingerprint"):
        judged(recipe, out)
    assert judged(recipe, out, allow_drift=True)["drift"] == ["the training's fingerprint is not known"]


def test_a_resumed_run_goes_on_with_its_fingerprint(project: Path, tmp_path: Path) -> None:
    settings = ["train.updates=2", "eval.tasks=1"]
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        start(load(project / "recipe.toml", settings), out, stop_at=0)
    before = json.loads((out / "fingerprint.json").read_text())
    assert before["roles"]["main"]
    start(load(project / "recipe.toml", settings), out, resume=True)
    assert json.loads((out / "fingerprint.json").read_text()) == before


AGENT = '''
import openai

TOOLS = TOOLS_HERE

def run(task, ctx):
    """A user's own agent, with tools of its own."""
    model = ctx.model("main")
    system = f"It is 2026-11-30. Work in /tmp/{task.id}.\\nUse the tools, and never guess."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        reply = client.chat.completions.create(model=model.name, messages=messages, tools=TOOLS, max_tokens=8)
    return reply.choices[0].message.content or ""
'''


def test_a_run_is_served_to_its_own_harness_only(project: Path, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    name = f"agent_{abs(hash(str(project)))}"  # a module's name is known once a process
    (project / f"{name}.py").write_text(AGENT.replace("TOOLS_HERE", repr(tools)))
    settings = [f'harness="{name}:run"', "train.updates=1", "eval.tasks=1"]
    recipe, out = load(project / "recipe.toml", settings), tmp_path / "out"
    start(recipe, out)
    (project / f"{name}.py").unlink()  # where it is served, the harness need not be
    heard = []

    async def visit(line: str, task: asyncio.Task[Any]) -> None:
        url, key = line.split()[1], (tmp_path / "gw" / "admin.key").read_text().strip()
        async with httpx2.AsyncClient(timeout=30) as client:
            made = await client.post(f"{url}/admin/v1/rollouts", headers={"authorization": f"Bearer {key}"}, json={})
            for system in ("It is 2027-01-01. Work in /tmp/zz.", "You are another."):
                content = system + "\nUse the tools, and never guess."
                messages = [{"role": "system", "content": content}, {"role": "user", "content": "say 1"}]
                body = {"messages": messages, "tools": tools, "max_tokens": 8}
                heard.append(await client.post(f"{url}{made.json()['base_path']}/chat/completions", json=body))
        task.cancel()

    async def serve(allow_drift: bool) -> None:
        (tmp_path / "gw").mkdir(exist_ok=True)
        visits: list[asyncio.Task[None]] = []
        task = asyncio.current_task()
        assert task is not None
        key = admin_key(tmp_path / "gw", "127.0.0.1")
        tell = lambda line: visits.append(asyncio.ensure_future(visit(line, task)))  # noqa: E731
        try:
            await _serve(recipe, tmp_path / "gw", out, "127.0.0.1", 0, key, tell, allow_drift)
        except asyncio.CancelledError:
            await asyncio.gather(*visits)

    run_until_stopped(serve(False))
    assert [answer.status_code for answer in heard] == [200, 403]
    error = heard[1].json()["error"]
    assert error["code"] == "harness_drift" and "+You are another." in error["message"]
    run_until_stopped(serve(True))
    assert [answer.status_code for answer in heard[2:]] == [200, 200]
    with pytest.raises(ParityError, match=r"limits\.max_tokens: 24 in training, 25 now"):
        recipe = load(project / "recipe.toml", [*settings, "sampling.max_tokens=25"])
        run_until_stopped(serve(False))
