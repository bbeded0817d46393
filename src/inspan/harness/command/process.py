"""One run of a program. Contract: whatever ends it, none of its processes outlives it; its output is bounded.

On Linux a supervisor process is the reaper of all that descends from the program (`supervise.py`). Should the program
kill or stop it, all that has the workspace in its environment is killed instead. Elsewhere the process group is killed,
and what has left that is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STDERR_TAIL = 16 * 1024
LAST_WORDS_S = 0.5  # real time, for what a killed program has left in its pipes
_SUPERVISOR = Path(__file__).with_name("supervise.py")


@dataclass(slots=True)
class Output:
    """What a program wrote so far: the first `most` bytes of stdout, and the tail of stderr."""

    most: int
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    overflowed: bool = False


async def execute(
    file: str, argv: Sequence[str], output: Output, *, env: Mapping[str, str], place: Path, cwd: Path, stdin: bytes
) -> int:
    """Run a program to its end; its exit code, or 128 + the signal that killed it.

    A cancellation kills it and all that it started. `place` is the workspace: no other process has it in its
    environment. Raises OSError if the program cannot start.
    """
    supervised = sys.platform == "linux"
    line = [file, *argv[1:]]
    if supervised:
        line = [sys.executable, "-I", "-S", "-B", str(_SUPERVISOR), str(os.getpid()), file, *argv]
    process = await asyncio.create_subprocess_exec(
        *line,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,  # Ctrl-C in a terminal is ours
    )
    assert process.stdin and process.stdout and process.stderr
    talk = asyncio.gather(_feed(process.stdin, stdin), _head(process.stdout, output), _tail(process.stderr, output))
    try:
        await asyncio.shield(talk)
        code = await process.wait()
    finally:
        if process.returncode is None:
            _stop(process, supervised)
            await asyncio.shield(process.wait())
        if supervised and (process.returncode or 0) < 0:
            _kill_by_place(os.fsencode(place))
        await asyncio.wait({talk}, timeout=LAST_WORDS_S)
        talk.cancel()
    return code if code >= 0 else 128 - code


def _stop(process: asyncio.subprocess.Process, supervised: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if supervised:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # the program may have stopped it
        else:
            os.killpg(process.pid, signal.SIGKILL)


def _kill_by_place(place: bytes) -> None:
    """Kill what a supervisor that was killed has left: in rounds, for it may fork meanwhile."""
    left = True
    while left:
        left = False
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if entry.isdecimal() and place in Path("/proc", entry, "environ").read_bytes():
                    os.kill(int(entry), signal.SIGKILL)
                    left = True


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read what it is told
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _head(pipe: asyncio.StreamReader, output: Output) -> None:
    while piece := await pipe.read(1 << 16):
        room = output.most - len(output.stdout)
        output.stdout += piece[:room]
        output.overflowed |= len(piece) > room


async def _tail(pipe: asyncio.StreamReader, output: Output) -> None:
    while piece := await pipe.read(1 << 16):
        output.stderr += piece
        del output.stderr[:-STDERR_TAIL]
