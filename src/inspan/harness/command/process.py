"""One run of a program. Contract: whatever ends it, none of its processes outlives it; its output is bounded.

On Linux a supervisor process is the reaper of all that descends from the program (`supervise.py`); elsewhere its
process group is killed, and what has left that is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STDERR_TAIL = 16 * 1024
_SUPERVISOR = Path(__file__).with_name("supervise.py")


@dataclass(frozen=True, slots=True)
class Completed:
    """How a program ended. `stdout` is cut at the limit (`overflowed`); of stderr the tail is kept."""

    code: int
    stdout: bytes
    stderr: bytes
    overflowed: bool


async def execute(
    file: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdin: bytes, most: int
) -> Completed:
    """Run a program to its end; a cancellation kills it and all that it started. Raises OSError if it cannot start."""
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
    reading = asyncio.gather(
        _feed(process.stdin, stdin), _head(process.stdout, most), _tail(process.stderr, STDERR_TAIL)
    )
    try:
        _, (stdout, overflowed), stderr = await reading
        code = await process.wait()
    finally:
        reading.cancel()
        if process.returncode is None:
            _stop(process, supervised)
            await asyncio.shield(process.wait())
    return Completed(code, stdout, stderr, overflowed)


def _stop(process: asyncio.subprocess.Process, supervised: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if supervised:
            process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL)


async def _feed(pipe: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it does not read what it is told
        pipe.write(data)
        await pipe.drain()
    pipe.close()


async def _head(pipe: asyncio.StreamReader, most: int) -> tuple[bytes, bool]:
    kept, size = [], 0
    while piece := await pipe.read(1 << 16):
        if size < most:
            kept.append(piece[: most - size])
        size += len(piece)
    return b"".join(kept), size > most


async def _tail(pipe: asyncio.StreamReader, most: int) -> bytes:
    kept = b""
    while piece := await pipe.read(1 << 16):
        kept = (kept + piece)[-most:]
    return kept
