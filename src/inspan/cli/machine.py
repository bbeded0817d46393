"""Facts about this machine, read and not changed. Contract: a fact that cannot be had is None; nothing raises."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path


def cores() -> int:
    """CPU cores that this process may use: its affinity, cut to the control group's quota."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(free, round(quota))) if quota else free


def _quota() -> float | None:
    words = (read("/sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and words[0].isdecimal():
        return int(words[0]) / int(words[1])
    amount, period = (read(f"/sys/fs/cgroup/cpu/cpu.cfs_{k}_us") for k in ("quota", "period"))
    if amount and period and int(amount) > 0:
        return int(amount) / int(period)
    return None


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory: all of it (cut to the control group's limit), and what is available now."""
    lines = dict(line.split(":", 1) for line in (read("/proc/meminfo") or "").splitlines() if ":" in line)
    total, free = (int(lines[k].split()[0]) * 1024 if k in lines else None for k in ("MemTotal", "MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (read(path) or "").strip()
        if text.isdecimal() and total is not None and int(text) < total:
            total, free = int(text), min(free or int(text), int(text))
    return total, free


def cpu_name() -> str:
    """The processor's name."""
    for line in (read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """The processor's feature flags; empty where they cannot be read."""
    for line in (read("/proc/cpuinfo") or "").splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def disk(path: Path) -> int | None:
    """Bytes free where `path` is or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def loopback() -> str | None:
    """Why no server can be started on this machine's loopback, or None when one can."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            with socket.create_connection(server.getsockname(), timeout=2):
                return None
    except OSError as error:
        return error.strerror or str(error)


def works(*argv: str) -> str | None:
    """Why a command does not work, or None when it does (exit code 0 within five seconds)."""
    if shutil.which(argv[0]) is None:
        return "not installed"
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    text = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return None if done.returncode == 0 else (text[-1] if text else f"exit code {done.returncode}")


@dataclass(frozen=True, slots=True)
class Torch:
    """The torch that is installed. `error` says why it cannot be imported."""

    version: str = ""
    cuda_build: str | None = None
    gpus: tuple[str, ...] = ()
    threads: int = 0
    error: str | None = None


def torch_facts() -> Torch:
    """Import torch and look; takes a second or two."""
    try:
        import torch
    except Exception as error:  # a broken install may raise anything; the doctor is there to say so
        return Torch(error=f"{type(error).__name__}: {error}")
    names: tuple[str, ...] = ()
    if torch.cuda.is_available():
        names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Torch(torch.__version__, torch.version.cuda, names, torch.get_num_threads())


def read(path: str) -> str | None:
    """A small file's text, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
