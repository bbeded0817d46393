"""Runs one program and leaves nothing of it behind. Contract: standard library only, Linux, a process of its own.

It is the reaper of every process that descends from the program, also of those that leave its session or its group:
when the program ends, when SIGTERM comes, and when the process that started it dies (`PR_SET_PDEATHSIG`), all of them
are killed. It ends as the program did: with its exit code, or 128 + the signal that killed it. When it is killed itself
the program dies with it, and the rest is the starter's to find.

    supervise.py PID-OF-THE-STARTER FILE ARGV0 ARGV1...
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND = 127


def descendants() -> list[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(entry))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def kill_all() -> None:
    """Kill and reap until nothing is left. A process that forks meanwhile is found in a later round.

    One that has become another user's (setuid) cannot be killed, and is not waited for.
    """
    while True:
        below, refused = descendants(), 0
        for process in below:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                refused += 1
        if below and refused == len(below):
            return
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def main(argv: list[str]) -> int:
    """Run the program to its end."""
    libc = ctypes.CDLL(None)
    parent = int(argv[0])
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (kill_all(), os._exit(128 + signal.SIGTERM)))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to the whole group; the parent decides
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before this line
        return 128 + signal.SIGTERM
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            os.execve(argv[1], argv[2:], os.environ)
        except OSError as error:
            os.write(2, f"{argv[1]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NOT_FOUND)
    for stream in (0, 1):  # only the program holds its pipes, so that their end is its end
        os.close(stream)
    while True:
        process, status = os.waitpid(-1, 0)
        if process == child:
            break
    kill_all()
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    os._exit(code)
