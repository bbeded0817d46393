"""Outside programs as harnesses: what they get, how they answer, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from inspan.config.command import Command
from inspan.errors import RecipeError
from inspan.harness.base import Context, Endpoint
from inspan.harness.command.run import CommandHarness, ProgramFailed, load, version
from inspan.harness.command.workspace import Workspace
from inspan.tasks.base import Task

CONTEXT = Context(
    {
        "main": Endpoint("http://127.0.0.1:9/r/key/v1", "key", "main"),
        "helper": Endpoint("http://127.0.0.1:9/r/key/v1", "key", "helper"),
    }
)
TASK = Task("t1", "What is {model}?\nSay – now.", "x", meta={"files": {"data/in.txt": "given"}})


def program(code: str, **fields) -> CommandHarness:
    return load(Command(argv=[sys.executable, "-c", code], **fields))


async def answer(code: str, task: Task = TASK, **fields) -> str:
    return await program(code, **fields).run(task, CONTEXT)


def alive(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if marker.encode() in b" ".join(words) and state != "Z":
            found.append(entry.name)
    return found


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- what it gets -----------------------------------------------------------------------------------------------


async def test_the_environment_holds_what_a_client_needs_and_nothing_of_ours(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "ours")
    monkeypatch.setenv("PASSED", "on")
    code = "import json, os; print(json.dumps({**os.environ, 'cwd': os.getcwd()}))"
    fields = {"env": {"MODEL": "{model}", "SUB": "{base_url:helper}"}, "pass_env": ["PASSED", "NOT_THERE"]}
    got = json.loads(await answer(code, **fields))
    assert "SECRET_TOKEN" not in got and "NOT_THERE" not in got and got["PASSED"] == "on"
    assert got["OPENAI_BASE_URL"] == "http://127.0.0.1:9/r/key/v1" and got["OPENAI_API_KEY"] == "key"
    assert got["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9/r/key"
    assert (got["MODEL"], got["SUB"]) == ("main", "http://127.0.0.1:9/r/key/as/helper/v1")
    assert got["HOME"] != os.environ["HOME"] and got["cwd"].startswith(str(Path(got["HOME"]).parent))
    assert not Path(got["cwd"]).exists(), "the workspace is gone"


async def test_the_task_comes_by_argument_by_file_or_on_standard_input(tmp_path):
    code = "import sys; print(repr([sys.argv[1], open(sys.argv[2]).read(), sys.stdin.read()]))"
    made = Command(argv=[sys.executable, "-c", code, "{task}", "{task_file}"], stdin="> {task}")
    got = eval(await load(made).run(TASK, CONTEXT))
    assert got == [TASK.prompt, TASK.prompt, "> " + TASK.prompt], "what is put in is not read for placeholders again"


async def test_files_of_the_template_of_the_task_and_of_the_recipe_are_there(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "t.txt").write_text("template")
    code = (
        "import os; print(*(open(os.path.expanduser(n)).read() for n in "
        "('sub/t.txt', 'data/in.txt', 'c.json', '~/.x/y')), sep='|')"
    )
    files = {"c.json": '{"url": {"at": "{base_url}"}}', "~/.x/y": "{model}"}
    got = await answer(code, template=str(tmp_path), files=files)
    assert got == 'template|given|{"url": {"at": "http://127.0.0.1:9/r/key/v1"}}|main'
    assert (tmp_path / "sub" / "t.txt").read_text() == "template"


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out"])
async def test_a_task_writes_only_into_its_workspace(name):
    task = Task("t", "?", "x", meta={"files": {name: "bad"}})
    with pytest.raises(Exception, match="no text file of the workspace"):
        await answer("print(1)", task)


# ---- how it answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "pick", "expected"),
    [
        ("print(' a\\nb\\n\\n')", "whole", "a\nb"),
        ("print('a\\nb\\n\\n')", "last_line", "b"),
        ('print(\'log\')\nprint(\'{"r": {"text": ["x", "yes"]}}\')', "json:r.text.1", "yes"),
        ("print('{\"n\": 3}')", "json:n", "3"),
        ("print('Answer: 1\\nAnswer: 2')", "regex:^Answer: (.*)$", "2"),
        ("import sys; sys.stdout.buffer.write(b'caf\\xe9')", "whole", "caf\ufffd"),
        ("", "whole", ""),
    ],
)
async def test_an_answer_on_standard_output(code, pick, expected):
    assert await answer(code, pick=pick) == expected


async def test_an_answer_in_a_file():
    code = "open('out.json', 'w').write('{\"a\": \"b\"}')"
    assert await answer(code, answer="file", answer_file="out.json", pick="json:a") == "b"


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        ("pass", {"answer": "file", "answer_file": "out"}, "it left no out"),
        ("import os; os.mkfifo('out')", {"answer": "file", "answer_file": "out"}, "no file"),
        ("import os; os.symlink('/etc/passwd', 'out')", {"answer": "file", "answer_file": "out"}, "out of the"),
        ("print('x' * 5000)", {"output_bytes": 4000}, "more than 4000 bytes"),
        ("print('x')", {"pick": "json:a"}, "no line of its output is JSON"),
        ("print('x')", {"pick": "regex:y"}, "matches 'y'"),
        ("import sys; sys.exit('it broke')", {}, "ended with exit code 1: it broke"),
        ("print('told here'); raise SystemExit(2)", {}, "ended with exit code 2: told here"),
        ("import os; os.kill(os.getpid(), 9)", {}, "ended with signal 9"),
    ],
)
async def test_what_is_no_answer_is_a_failure_that_says_why(code, fields, expected):
    with pytest.raises(ProgramFailed, match=expected):
        await answer(code, **fields)


async def test_a_task_that_is_too_long_for_an_argument_is_told_how_to_be_given():
    long = Task("t", "x" * 200_000, "x")
    with pytest.raises(ProgramFailed, match=r"use \{task_file\} or stdin"):
        await load(Command(argv=[sys.executable, "-c", "print(1)", "{task}"])).run(long, CONTEXT)
    code = "import sys; print(len(sys.stdin.read()), len(open(sys.argv[1]).read()))"
    made = Command(argv=[sys.executable, "-c", code, "{task_file}"], stdin="{task}")
    assert await load(made).run(long, CONTEXT) == "200000 200000"


async def test_other_exit_codes_may_be_no_failure():
    assert await answer("import sys; print('a'); sys.exit(3)", ok_exits=[0, 3]) == "a"


async def test_an_answer_that_is_a_diff(tmp_path):
    (tmp_path / "keep.txt").write_text("same\n")
    (tmp_path / "edit.txt").write_text("one\ntwo\n")
    (tmp_path / "gone.bin").write_bytes(b"\0\1")
    code = (
        "import os; open('edit.txt', 'a').write('three'); open('new.txt', 'w').write('n\\n'); os.remove('gone.bin')\n"
        "os.mkdir('.git'); open('.git/x', 'w').write('not ours')"
    )
    assert await answer(code, Task("t", "?", "x"), answer="diff", template=str(tmp_path)) == (
        "--- a/edit.txt\n+++ b/edit.txt\n@@ -1,2 +1,3 @@\n one\n two\n+three\n\\ No newline at end of file\n"
        "Binary files a/gone.bin and /dev/null differ\n"
        "--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+n\n"
    )


# ---- its end ----------------------------------------------------------------------------------------------------

LEAVES = """
import os, subprocess, sys, time
for detach in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)  # MARK"], start_new_session=detach)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)  # MARK"])
    os._exit(0)
print("started", flush=True)
open("READY", "w").close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their session are only found on Linux")
async def test_what_a_program_leaves_behind_is_killed_when_it_ends():
    marker = f"leaves-{os.getpid()}"
    assert await answer(LEAVES.replace("MARK", marker)) == "started"
    assert alive(marker) == []


@pytest.mark.skipif(sys.platform != "linux", reason="processes that leave their session are only found on Linux")
@pytest.mark.parametrize("attack", ["", "os.kill(os.getppid(), 9)", "os.kill(os.getppid(), 19)"])
async def test_a_cancelled_program_goes_with_all_it_started_even_if_it_kills_or_stops_who_watches_it(attack, tmp_path):
    marker = f"cancelled-{os.getpid()}"
    ready = tmp_path / "ready"
    code = LEAVES.replace("MARK", marker).replace("READY", str(ready)) + f"{attack}\ntime.sleep(300)  # {marker}"
    task = asyncio.ensure_future(answer(code, keep=False))
    await asyncio.to_thread(wait_for, ready.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert alive(marker) == []


async def test_a_program_that_closes_its_output_and_ignores_its_input_is_waited_for():
    code = "import os, time; os.close(1); os.close(2); time.sleep(0.05); open('out', 'w').write('late')"
    assert await answer(code, answer="file", answer_file="out", stdin="x" * 1_000_000) == "late"


async def test_a_workspace_that_is_given_up_while_it_is_filled_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    filling, go_on = threading.Event(), threading.Event()

    def fill(workspace, task, template):
        filling.set()
        go_on.wait(30)
        (workspace.place / "late").touch()

    monkeypatch.setattr(Workspace, "fill", fill)
    task = asyncio.ensure_future(answer("print(1)"))
    await asyncio.to_thread(filling.wait, 30)
    task.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


async def test_what_a_program_wrote_is_kept_with_its_workspace_also_when_it_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os, time; os.write(1, b'said'); os.write(2, b'why'); open('ready', 'w'); time.sleep(300)"
    task = asyncio.ensure_future(answer(code, keep=True))
    await asyncio.to_thread(wait_for, lambda: list(tmp_path.glob("*/work/ready")))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (place,) = tmp_path.iterdir()
    assert ((place / "stdout").read_text(), (place / "stderr").read_text()) == ("said", "why")


async def test_a_workspace_that_was_made_read_only_is_removed_and_one_that_is_kept_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os; os.mkdir('d'); open('d/f', 'w').close(); os.chmod('d', 0o500); print(os.getcwd())"
    gone, kept = Path(await answer(code)), Path(await answer(code, keep=True))
    assert not gone.exists() and (kept / "d" / "f").exists()
    (kept / "d").chmod(stat.S_IRWXU)


# ---- before it starts -------------------------------------------------------------------------------------------


def test_a_program_that_is_not_there_is_told_with_how_to_install_it(tmp_path):
    with pytest.raises(RecipeError, match="no program 'nowhere'") as caught:
        load(Command(argv=["nowhere"], install="npm install nowhere"))
    assert caught.value.hint == "install it: npm install nowhere"
    with pytest.raises(RecipeError, match="no folder"):
        load(Command(argv=["sh"], template=str(tmp_path / "none")))


def test_a_program_is_found_in_the_recipes_folders(tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho hi\n")
    tool.chmod(0o755)
    assert asyncio.run(load(Command(argv=["tool"], path=[str(tmp_path)])).run(TASK, CONTEXT)) == "hi"
    assert asyncio.run(load(Command(argv=["{folder}/tool"], folder=str(tmp_path))).run(TASK, CONTEXT)) == "hi"


def test_its_version_is_that_of_how_it_is_run(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("print(1)")
    made = [Command(argv=["python", "{folder}/a.py"], folder=str(tmp_path))]
    first = version(made[0])
    script.write_text("print(2)")
    assert version(made[0]) != first
    script.write_text("print(1)")
    assert version(made[0]) == first == version(made[0].model_copy(update={"keep": True}))
    assert version(made[0].model_copy(update={"env": {"A": "b"}})) != first


STARTER = """
import asyncio, sys
from inspan.config.command import Command
from inspan.harness.base import Context, Endpoint
from inspan.harness.command.run import load
from inspan.tasks.base import Task
made = load(Command(argv=[sys.executable, "-c", CODE]))
asyncio.run(made.run(Task("t", "?", "x"), Context({"main": Endpoint("http://127.0.0.1:9/r/k/v1", "k", "main")})))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is only heard on Linux")
def test_when_we_are_killed_the_programs_go_too(tmp_path):
    marker, ready = f"orphan-{os.getpid()}", tmp_path / "ready"
    code = LEAVES.replace("MARK", marker).replace("READY", str(ready)) + f"time.sleep(300)  # {marker}"
    starter = subprocess.Popen([sys.executable, "-c", f"CODE = {code!r}\n{STARTER}"])
    wait_for(ready.exists)
    assert len(alive(marker)) >= 4
    starter.kill()
    starter.wait()
    wait_for(lambda: not alive(marker))
