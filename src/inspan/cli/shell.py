"""From an error to what a person sees. Contract: no traceback for what was foreseen; the exit code says whose turn it
is.

0 done · 1 something failed here · 2 the input is at fault · 130 stopped by Ctrl-C · 143 stopped by SIGTERM.
`INSPAN_TRACEBACK=1` shows the traceback of any error.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any, Never, cast

from inspan.errors import InputError, InspanError
from inspan.stopping import Terminate

FAILED, BAD_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class Stopped(Exception):
    """A run was stopped by a signal; `message` says what is saved and how to go on."""

    def __init__(self, message: str, stop: KeyboardInterrupt) -> None:
        super().__init__(message)
        self.code = TERMINATED if isinstance(stop, Terminate) else INTERRUPTED


def main() -> None:
    """The entry point of the `inspan` script."""
    signal.signal(signal.SIGTERM, _terminate)
    from inspan.cli.app import app

    try:
        code = app(standalone_mode=False)
    except SystemExit:
        raise
    except BaseException as error:  # the last line of defence: everything becomes a message and a code
        sys.exit(report(error))
    sys.exit(code if isinstance(code, int) else 0)


def report(error: BaseException) -> int:
    """Write what went wrong to stderr and return the exit code."""
    if os.environ.get("INSPAN_TRACEBACK") == "1":
        traceback.print_exception(error)
    text, code = describe(error)
    if text:
        print(text, file=sys.stderr)
    return code


def describe(error: BaseException) -> tuple[str, int]:
    """The message and exit code of an error."""
    import typer

    # Typer carries its own copy of click or click itself, depending on its version: ask it for the class.
    usage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
    if isinstance(error, usage):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "inspan"
        return f"error: {cast(Any, error).format_message()}\n  `{command} --help` lists what there is", BAD_INPUT
    if isinstance(error, Stopped):
        return f"stopped: {error}" if str(error) else "stopped", error.code
    if isinstance(error, KeyboardInterrupt):
        return "stopped", Stopped("", error).code
    if isinstance(error, typer.Abort):
        return "stopped", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains again at exit
        return "", FAILED
    if isinstance(error, InspanError):
        return f"error: {sentence(error)}", BAD_INPUT if isinstance(error, InputError) else FAILED
    if isinstance(error, OSError) and error.errno is not None:
        return f"error: {_os_sentence(error)}", FAILED
    if isinstance(error, MemoryError):
        return "error: out of memory (lower engine.slots, train.token_budget or rollout.concurrency)", FAILED
    kind = type(error).__name__
    return f"error: unexpected {kind}: {error} (INSPAN_TRACEBACK=1 shows where; please report it)", FAILED


def sentence(error: InspanError) -> str:
    """What, where, and what to do."""
    where = f" ({error.where})" if error.where else ""
    hint = f"\n  {error.hint}" if error.hint else ""
    return f"{error.what}{where}{hint}"


def _os_sentence(error: OSError) -> str:
    place = f" ({error.filename})" if error.filename else ""
    hints = {
        errno.ENOSPC: "the disk is full: free space, or choose another folder with --out; what was saved is intact",
        errno.EDQUOT: "the disk quota is used up: free space, or choose another folder with --out",
        errno.EADDRINUSE: "the port is in use: choose another one",
        errno.EACCES: "check the permissions, or choose another folder with --out",
        errno.EEXIST: "something of that name is there already: choose another folder with --out",
        errno.ENOTDIR: "a file is where a folder should be: choose another folder with --out",
        errno.EROFS: "the file system is read-only: choose another folder with --out",
        errno.EMFILE: "too many open files: raise `ulimit -n` or lower rollout.concurrency",
    }
    hint = hints.get(error.errno or 0, "")
    return f"{error.strerror}{place}" + (f"\n  {hint}" if hint else "")


def _terminate(signum: int, frame: FrameType | None) -> Never:
    raise Terminate
