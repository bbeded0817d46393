"""Parity end to end: a foreign client is trained, judged another day, and refused when it shows something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from starting import Silent, start

from inspan.config import Recipe, load
from inspan.errors import ParityError
from inspan.trace.store import TraceStore
from inspan.train import evaluate

CLIENT = r'''
"""A program that knows nothing of us: its own prompt, two tools, plain HTTP. Its day and its tools are in day.json."""
import json, os, pathlib, sys, urllib.request

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
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json",
     "user-agent": "fixer/1.2 (linux; x64)"},
)
answer = json.load(urllib.request.urlopen(request))
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
