"""Directories that are whole or not there. Contract: files are written into a hidden temporary directory and synced,
the manifest (sizes and sha256) is written last, and one rename makes all of it visible. A reader refuses a directory
without a manifest, or one whose files do not match it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from inspan.errors import CheckpointError, StoreError

MANIFEST = "manifest.json"
Writer = Callable[[Path], None]


def write_directory(target: Path, files: Mapping[str, Writer], meta: Mapping[str, Any]) -> Path:
    """Create `target` with `files` (name → what writes it) and a manifest that also holds `meta`.

    Raises StoreError when the disk is full or cannot be written, or when `target` exists; nothing stays behind then.
    """
    from safetensors import SafetensorError

    if target.exists():
        raise StoreError("exists already", where=str(target), hint="a published version is never overwritten")
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        entries = {}
        for name, write in files.items():
            write(temporary / name)
            entries[name] = _seal(temporary / name)
        _write_text(temporary / MANIFEST, json.dumps({**meta, "files": entries}, indent=1, sort_keys=True))
        _sync(temporary)
        os.rename(temporary, target)
        _sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        hint = "free some space; what was saved before is untouched"
        raise StoreError(f"cannot write: {error}", where=str(target), hint=hint) from error
    return target


def _seal(path: Path) -> dict[str, Any]:
    """Sync a file and describe it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(path: Path) -> bool:
    """Whether `path` was written to its end (its bytes are checked by `read_manifest`)."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path, *, hint: str | None = None) -> dict[str, Any]:
    """The manifest of a directory whose every file was found to match it; else CheckpointError names the file."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        entries = dict(manifest["files"])
    except FileNotFoundError:
        raise CheckpointError("incomplete: it has no manifest", where=str(path), hint=hint) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"corrupt: {error}", where=str(path / MANIFEST), hint=hint) from error
    for name, entry in entries.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError("incomplete: the file is missing", where=str(file), hint=hint)
        if _seal(file) != entry:
            raise CheckpointError("corrupt: size or sha256 differ from the manifest", where=str(file), hint=hint)
    return manifest


def text_writer(text: str) -> Writer:
    """Writes `text` as UTF-8."""
    return lambda path: _write_text(path, text)


def tensor_writer(tensors: Mapping[str, Tensor]) -> Writer:
    """Writes tensors as safetensors."""

    def write(path: Path) -> None:
        from safetensors.torch import save_file

        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(path), {"format": "pt"})

    return write


def copy_writer(source: Path) -> Writer:
    """Writes a copy of a file."""
    return lambda path: _copy(source, path)


def _copy(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)


def write_weights(
    directory: str | Path, version: int, tensors: Mapping[str, Tensor], config: str, beside: Sequence[Path] = ()
) -> Path:
    """Publish weights as `directory`/v<version, six digits>, a directory that transformers can load.

    `beside` are files to copy into it (a tokenizer's), which make it a whole model.
    """
    files = {path.name: copy_writer(path) for path in beside}
    files |= {"config.json": text_writer(config), "model.safetensors": tensor_writer(tensors)}
    return write_directory(Path(directory) / f"v{version:06d}", files, {"kind": "weights", "version": version})


def read_weights(path: str | Path) -> tuple[int, dict[str, Tensor]]:
    """The version and tensors of published weights; raises CheckpointError when incomplete or corrupt."""
    from safetensors.torch import load_file

    manifest = read_manifest(Path(path), hint="publish them again: resume the run that made them")
    if manifest.get("kind") != "weights":
        raise CheckpointError("not published weights", where=str(path))
    return int(manifest["version"]), load_file(str(Path(path) / "model.safetensors"))
