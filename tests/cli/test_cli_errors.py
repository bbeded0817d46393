"""What a person sees when something goes wrong: one message, the right exit code, no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from inspan.cli.shell import Stopped, describe
from inspan.errors import CheckpointError, EngineError, RecipeError

INSPAN = [sys.executable, "-c", "from inspan.cli import main; main()"]


def inspan(*args, cwd=None, **env):
    return subprocess.run(
        [*INSPAN, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (RecipeError("bad", where="a.toml", hint="mend it"), "error: bad (a.toml)\n  mend it", 2),
        (CheckpointError("broken", where="ckpt"), "error: broken (ckpt)", 1),
        (EngineError("crashed"), "error: crashed", 1),
        (OSError(errno.ENOSPC, "No space left on device", "m.jsonl"), "the disk is full", 1),
        (OSError(errno.EADDRINUSE, "Address already in use"), "choose another", 1),
        (OSError(errno.EEXIST, "File exists", "out"), "choose another folder", 1),
        (MemoryError(), "out of memory", 1),
        (Stopped("all is saved", KeyboardInterrupt()), "stopped: all is saved", 130),
        (KeyboardInterrupt(), "stopped", 130),
        (ZeroDivisionError("by zero"), "unexpected ZeroDivisionError: by zero", 1),
    ],
)
def test_an_error_becomes_a_message_and_a_code(error, text, code):
    message, got = describe(error)
    assert text in message and got == code


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["trian"], "No such command 'trian'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "nowhere.toml"], "no such recipe (nowhere.toml)"),
        (["doctor", "--what"], "No such option: --what"),
        (["view", "nowhere"], "no such run directory (nowhere)"),
        (["export", "nowhere"], "no trace store"),
        (["export", ".", "--format", "csv"], "unknown value 'csv' (--format)"),
        (["chat", "swarm", "--base-url", "http://127.0.0.1:9/v1", "--question", "?"], "cannot reach the server"),
        (["chat", "swram", "--base-url", "http://127.0.0.1:9/v1", "--question", "?"], "unknown agent 'swram'"),
    ],
)
def test_bad_input_exits_with_2_and_no_traceback(args, text, tmp_path):
    done = inspan(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr


def test_the_traceback_can_be_asked_for(tmp_path):
    done = inspan("train", "nowhere.toml", cwd=tmp_path, INSPAN_TRACEBACK="1")
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_help_and_version_load_no_heavy_module():
    heavy = "{'torch', 'transformers', 'numpy', 'openai', 'pydantic', 'starlette'}"
    code = (
        "import sys\nfrom inspan.cli import main\nsys.argv = ['inspan', '--help']\ntry: main()\n"
        f"except SystemExit as e: print(e.code, sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "0 []"
    assert "doctor" in done.stdout
    assert inspan("--version").stdout.startswith("inspan ")
