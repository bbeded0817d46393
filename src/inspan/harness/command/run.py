"""The harness `command`: a program that knows nothing of us, pointed at the gateway. Contract: one process tree a
rollout, in a workspace of its own, with a scrubbed environment; all of it is gone when the rollout is over.

An exit code that is none of `ok_exits`, an answer that is not there and too much output are failures of the harness.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inspan.config.command import Command
from inspan.errors import RecipeError
from inspan.harness.base import Context
from inspan.harness.command.answer import diff, pick
from inspan.harness.command.fill import fill
from inspan.harness.command.process import Output, execute
from inspan.harness.command.workspace import Workspace
from inspan.tasks.base import Task

_SAID = 300  # characters of its output that an error quotes


class ProgramFailed(RuntimeError):
    """The program ended otherwise than it should, or left no answer."""


@dataclass(frozen=True, slots=True)
class CommandHarness:
    """A program as a recipe describes it. Made by `load`, which sees that it is there."""

    command: Command
    search: str  # its PATH

    async def run(self, task: Task, ctx: Context) -> str:
        """One rollout: workspace, program, answer."""
        workspace = Workspace.make()
        try:
            await _finished(workspace.fill, task, self.command.template)
            return await self._answer(task, ctx, workspace)
        finally:
            if not self.command.keep:
                await asyncio.shield(asyncio.to_thread(workspace.remove))

    async def _answer(self, task: Task, ctx: Context, workspace: Workspace) -> str:
        command = self.command
        values = _values(command, task, ctx, workspace)
        for name, text in command.files.items():
            workspace.write(fill(name, values), fill(text, values), where="command.files")
        if command.answer == "diff":
            workspace.before = await asyncio.to_thread(workspace.tree)
        argv = [fill(part, values) for part in command.argv]
        file = find(argv[0], self.search, workspace.work)
        if file is None:
            raise ProgramFailed(f"there is no program {argv[0]}")
        output = Output(command.output_bytes)
        program = Path(argv[0]).name
        try:
            code = await execute(
                file,
                argv,
                output,
                env=self._environment(values, workspace),
                place=workspace.place,
                cwd=workspace.work,
                stdin=fill(command.stdin, values).encode(),
            )
        except OSError as error:
            if error.errno != errno.E2BIG:
                raise
            raise ProgramFailed("the task is too long to be an argument; use {task_file} or stdin") from None
        finally:
            if command.keep:
                workspace.record(output.stdout, output.stderr)
        if code not in command.ok_exits:
            raise ProgramFailed(f"{program} ended with {_ending(code)}{_quoted(output)}")
        try:
            return await asyncio.to_thread(self._read, output, workspace)
        except ValueError as error:
            raise ProgramFailed(f"{program} left no answer: {error}{_quoted(output)}") from None

    def _read(self, output: Output, workspace: Workspace) -> str:
        command = self.command
        if command.answer == "diff":
            text = diff(workspace.before, workspace.tree())
            if len(text) > command.output_bytes:
                raise ValueError(f"the diff has more than {command.output_bytes} bytes")
            return text
        if command.answer == "file":
            return pick(workspace.read(command.answer_file, command.output_bytes), command.pick)
        if output.overflowed:
            raise ValueError(f"it wrote more than {command.output_bytes} bytes")
        return pick(output.stdout.decode("utf-8", "replace"), command.pick)

    def _environment(self, values: Mapping[str, str], workspace: Workspace) -> dict[str, str]:
        """All that the program's environment holds."""
        command = self.command
        env = {
            "PATH": self.search,
            "HOME": str(workspace.home),
            "TMPDIR": str(workspace.tmp),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "NO_PROXY": "127.0.0.1,localhost,::1",
            "OPENAI_BASE_URL": values["base_url"],
            "OPENAI_API_KEY": values["api_key"],
            "ANTHROPIC_BASE_URL": values["root_url"],
            "ANTHROPIC_API_KEY": values["api_key"],
        }
        if command.threads:
            env["OMP_NUM_THREADS"] = str(command.threads)
        env |= {name: os.environ[name] for name in command.pass_env if name in os.environ}
        return env | {name: fill(text, values) for name, text in command.env.items()}


def load(command: Command) -> CommandHarness:
    """The harness, after a look at what it needs. Raises `RecipeError` for a program or a folder that is not there."""
    search = os.pathsep.join([*command.path, os.environ.get("PATH", os.defpath)])
    if not command.argv:
        raise RecipeError("no program is named", where="command.argv", hint='[command] argv = ["program", ...]')
    program = command.argv[0]
    if "{" in program:
        program = program.replace("{folder}", command.folder)
    if "{" not in program and find(program, search, Path(command.folder or ".")) is None:
        hint = f"install it: {command.install}" if command.install else "install it, or name its folder in command.path"
        raise RecipeError(f"there is no program {program!r}", where="command.argv", hint=hint)
    if command.template and not Path(command.template).is_dir():
        raise RecipeError(f"there is no folder {command.template}", where="command.template")
    return CommandHarness(command, search)


def find(program: str, search: str, folder: Path) -> str | None:
    """The file of a program: on the search path, or where a name with a slash leads from a folder."""
    if "/" in program:
        program = str(folder / program)
    return shutil.which(program, path=search)


def version(command: Command) -> str:
    """A hash of how the program is run, and of the files of the recipe's folder that its arguments name."""
    told = command.model_dump_json(exclude={"folder", "path", "template", "keep", "install", "output_bytes"})
    digest = hashlib.sha256(told.encode())
    for part in command.argv:
        path = Path(part.replace("{folder}", command.folder))
        if "{folder}" in part and path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _values(command: Command, task: Task, ctx: Context, workspace: Workspace) -> dict[str, str]:
    """What the placeholders stand for."""
    first = next(iter(ctx.endpoints.values()))
    values = {
        "task": task.prompt.replace("\0", ""),
        "task_id": task.id,
        "task_file": str(workspace.place / "task.txt"),
        "task_json": str(workspace.place / "task.json"),
        "base_url": first.base_url,
        "root_url": first.base_url.removesuffix("/v1"),
        "api_key": first.api_key,
        "model": first.name,
        "workspace": str(workspace.work),
        "home": str(workspace.home),
        "folder": command.folder,
    }
    for role, endpoint in ctx.endpoints.items():
        root = f"{endpoint.base_url.removesuffix('/v1')}/as/{role}"
        values |= {f"root_url:{role}": root, f"base_url:{role}": f"{root}/v1"}
    return values


async def _finished(work: Callable[..., None], *args: object) -> None:
    """Do it in a thread, and when cancelled wait until the thread is out of what is then removed."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        doing.exception()  # seen
        raise


def _ending(code: int) -> str:
    return f"signal {code - 128}" if 128 < code < 192 else f"exit code {code}"


def _quoted(output: Output) -> str:
    """The end of what it said; some programs tell their errors on standard output."""
    text = output.stderr.decode("utf-8", "replace").strip() or output.stdout.decode("utf-8", "replace").strip()
    return f": …{text[-_SAID:]}" if len(text) > _SAID else f": {text}" if text else ""
