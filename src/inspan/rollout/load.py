"""Finding the harness that a recipe names. Contract: what comes back can be run, or a RecipeError says what is missing.

Built-in agents are coroutines that yield to the event loop and share it. A user's function may block, so it runs
elsewhere (`on_loop` is False): it is `run(task, ctx)`, async or plain, and returns the answer as text. An outside
program is waited for on the loop and reaches the gateway over a socket.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inspan.config.command import Command
from inspan.config.objects import load_object
from inspan.errors import RecipeError
from inspan.harness.command import run as outside

COMMAND = "command"
BUILT_IN = {
    "swarm": "inspan.harness.swarm",
    "single": "inspan.harness.single",
    "search": "inspan.harness.search.agent",
}
_ROOM = "inspan.harness."


@dataclass(frozen=True, slots=True)
class LoadedHarness:
    """A harness ready to run. `version` is a hash of the source that it came from."""

    name: str
    run: Callable[..., Any]  # (task, ctx) -> str, or an awaitable of it
    on_loop: bool
    version: str
    socket: bool = True  # whether it reaches the gateway over a socket, not in-process


def load_harness(
    spec: str | object, python_path: Sequence[str] = (), *, command: Command | None = None
) -> LoadedHarness:
    """A built-in name, "module:function", a function, or an object with a `run(task, ctx)` method.

    "command" is the program that `command` describes.

    Functions and methods are taken to be the user's and run off the event loop; only built-in names run on it.
    Raises RecipeError when it cannot be found, is not callable or does not take `(task, ctx)`.
    """
    if spec == COMMAND:
        program = outside.load(command or Command())
        return LoadedHarness(COMMAND, program.run, True, outside.version(program.command))
    if isinstance(spec, str) and spec in BUILT_IN:
        module = importlib.import_module(BUILT_IN[spec])
        run = module.run
        return LoadedHarness(spec, run, True, _version(run), False)
    found = load_object(spec, python_path, what="harness") if isinstance(spec, str) else spec
    name = spec if isinstance(spec, str) else _name(found)
    if inspect.isclass(found):
        raise RecipeError(f"harness {name!r} is a class", hint="name a function run(task, ctx), or give an instance")
    run = getattr(found, "run", found)
    if not callable(run):
        raise RecipeError(f"harness {name!r} is a {type(found).__name__}, not a function run(task, ctx)")
    _check_signature(run, name)
    return LoadedHarness(name, run, False, _version(run))


def _check_signature(run: Callable[..., Any], name: str) -> None:
    try:
        signature = inspect.signature(run)
    except (TypeError, ValueError):
        return  # a built-in callable that does not tell; it will be seen when it runs
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise RecipeError(
            f"harness {name!r} cannot be called as run(task, ctx): {error}", hint=f"its signature is {signature}"
        ) from None
    if inspect.isasyncgenfunction(run) or inspect.isgeneratorfunction(run):
        raise RecipeError(f"harness {name!r} yields; it must return the answer", hint="use return, not yield")


def _name(found: object) -> str:
    owner = found if inspect.isroutine(found) else type(found)
    return f"{getattr(owner, '__module__', '?')}:{getattr(owner, '__qualname__', type(found).__name__)}"


def _version(run: Callable[..., Any]) -> str:
    """A hash of the source files that the harness ships in: its module, and for a built-in one the whole room."""
    module = sys.modules.get(getattr(run, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        return "unknown"
    built_in = module is not None and module.__name__ in BUILT_IN.values()
    folder = Path(file).parent
    if built_in and module is not None:
        folder = Path(file).parents[module.__name__.removeprefix(_ROOM).count(".")]
    files = sorted(folder.rglob("*.py")) if built_in else [Path(file)]
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
