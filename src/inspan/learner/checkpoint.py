"""One-cut checkpoints: weights, optimiser, random states and the caller's state, all of the same instant.

Contract: a checkpoint is `root`/ckpt-<serial>-step-<step>; the serial number orders them (a run that went back to an
earlier step still resumes from what it saved last). It is visible only when whole (see `store`); saving never touches
the earlier ones until the new one is complete, then all but the newest `keep` go. Nothing is pickled: tensors are
safetensors, the rest is JSON. What is restored equals what was saved, bit for bit.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from inspan.errors import CheckpointError
from inspan.learner.store import MANIFEST, is_complete, read_manifest, tensor_writer, text_writer, write_directory

PREFIX = "ckpt-"
_NAME = re.compile(PREFIX + r"(\d+)-step-(\d+)")


class Saveable(Protocol):
    """What can be checkpointed: `Learner` and `sft.Trainer`."""

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain data."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
        """Put them back."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. `state` is what the caller gave to `save_checkpoint`."""

    path: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(root: str | Path, learner: Saveable, state: Mapping[str, Any], *, step: int, keep: int = 3) -> Path:
    """Write a checkpoint of `learner` and the caller's JSON-able `state`; then drop all but the newest `keep`.

    Raises CheckpointError when `state` is not JSON, StoreError when the disk is full (the earlier ones remain).
    """
    tensors, plain = learner.snapshot()
    try:
        text = json.dumps({"learner": plain, "rng": _random_state(), "state": dict(state)}, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the state is not JSON: {error}", where=f"step {step}") from error
    directory = Path(root)
    directory.mkdir(parents=True, exist_ok=True)
    serial = max((number for number, _ in _found(directory)), default=0) + 1
    name = f"{PREFIX}{serial:06d}-step-{step}"
    tensors = {**tensors, "rng/torch": torch.get_rng_state()}
    files = {"tensors.safetensors": tensor_writer(tensors), "state.json": text_writer(text)}
    path = write_directory(directory / name, files, {"kind": "checkpoint", "step": step})
    _prune(directory, max(1, keep))
    return path


def latest(root: str | Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None. Unfinished ones are passed over."""
    complete = [path for _, path in _found(Path(root)) if is_complete(path)]
    return complete[-1] if complete else None


def load_checkpoint(path: str | Path, learner: Saveable) -> Checkpoint:
    """Check every file against the manifest, then restore `learner` and the random states.

    Raises CheckpointError that names the bad file and the previous usable checkpoint; nothing is changed then.
    """
    from safetensors.torch import load_file

    path = Path(path)
    manifest = read_manifest(path, hint=_advice(path))
    if manifest.get("kind") != "checkpoint":
        raise CheckpointError("not a checkpoint", where=str(path), hint=_advice(path))
    tensors = load_file(str(path / "tensors.safetensors"))
    data = json.loads((path / "state.json").read_text(encoding="utf-8"))
    learner.restore(tensors, data["learner"])
    torch.set_rng_state(tensors["rng/torch"])
    _restore_random(data["rng"])
    return Checkpoint(path, int(manifest["step"]), data["state"])


def _advice(path: Path) -> str:
    """What to do about a bad checkpoint: the newest other one that is whole."""
    names = [other for _, other in _found(path.parent)]
    for other in reversed(names[: names.index(path)] if path in names else names):
        try:
            read_manifest(other)
        except CheckpointError:
            continue
        return f"delete {path} to go on from the previous usable one, {other}"
    return "there is no earlier usable checkpoint: start again in another folder"


def _found(root: Path) -> list[tuple[int, Path]]:
    """(serial, path) of every checkpoint directory, oldest first."""
    matches = [(_NAME.fullmatch(path.name), path) for path in (root.glob(f"{PREFIX}*") if root.is_dir() else ())]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _prune(root: Path, keep: int) -> None:
    found = _found(root)
    complete = [path for _, path in found if is_complete(path)]
    for path in complete[:-keep]:
        (path / MANIFEST).unlink()  # from here on it is incomplete, whatever interrupts the rest
    for path in [path for _, path in found if not is_complete(path)] + list(root.glob(f".tmp-{PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)


def _random_state() -> dict[str, Any]:
    """The states of Python's and numpy's global generators as JSON; torch's travels as a tensor."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    numpy_state = [str(name), [int(k) for k in keys], int(position), int(has_gauss), float(cached)]
    return {"python": [version, list(internal), gauss], "numpy": numpy_state}


def _restore_random(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
