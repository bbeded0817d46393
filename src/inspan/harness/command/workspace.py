"""The place where one rollout's program runs. Contract: nothing is written outside it; it is gone afterwards.

<place>/work    its working directory: the template, the task's files, the recipe's files
<place>/home    HOME
<place>/tmp     TMPDIR
<place>/task.*  the task
<place>/stdout  with `keep`: what it wrote, also when it was killed; beside it stderr
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from inspan.errors import TaskError
from inspan.tasks.base import Task

_log = logging.getLogger("inspan.harness")
LARGEST_TREE = 64 * 1024 * 1024  # bytes of a workspace that a diff looks at


@dataclass(slots=True)
class Workspace:
    """A fresh directory. `before` is its tree at the start, where a diff is wanted."""

    place: Path
    before: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def make(cls) -> Workspace:
        """An empty place."""
        return cls(Path(tempfile.mkdtemp(prefix="inspan-")))

    def fill(self, task: Task, template: str) -> None:
        """Directories, the template's files and the task's (`meta.files`: name → text)."""
        if template:
            shutil.copytree(template, self.work, symlinks=True)
        for folder in (self.work, self.home, self.tmp):
            folder.mkdir(exist_ok=True)
        (self.place / "task.txt").write_text(task.prompt, encoding="utf-8")
        told = {"id": task.id, "prompt": task.prompt, "kind": task.kind, "meta": dict(task.meta)}
        (self.place / "task.json").write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
        files = task.meta.get("files", {})
        if not isinstance(files, Mapping):
            raise TaskError("meta.files is a table of texts by name", where=task.id)
        for name, text in files.items():
            self.write(str(name), text, where=task.id)

    @property
    def work(self) -> Path:
        """The working directory."""
        return self.place / "work"

    @property
    def home(self) -> Path:
        """HOME."""
        return self.place / "home"

    @property
    def tmp(self) -> Path:
        """TMPDIR."""
        return self.place / "tmp"

    def write(self, name: str, text: object, *, where: str) -> None:
        """Write a file of the workspace, or with `~/` of the home. Raises `TaskError` for what lies outside."""
        base = self.home if name.startswith("~/") else self.work
        path = base / name.removeprefix("~/")
        if not isinstance(text, str) or not path.resolve().is_relative_to(base.resolve()):
            raise TaskError(f"{name!r} is no text file of the workspace", where=where)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def read(self, name: str, most: int) -> str:
        """A file that the program wrote. Raises ValueError when there is none, or when it is too large."""
        base = self.home if name.startswith("~/") else self.work
        path = base / name.removeprefix("~/")
        if not path.resolve().is_relative_to(base.resolve()):
            raise ValueError(f"{name} leads out of the workspace")
        try:
            flags = os.O_RDONLY | os.O_NONBLOCK  # a FIFO in its place must not hang us
            with os.fdopen(os.open(path, flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise ValueError(f"{name} is no file")
                content = file.read(most + 1)
        except OSError as error:
            raise ValueError(f"it left no {name}: {error.strerror}") from None
        if len(content) > most:
            raise ValueError(f"{name} has more than {most} bytes")
        return content.decode("utf-8", "replace")

    def record(self, stdout: bytes | bytearray, stderr: bytes | bytearray) -> None:
        """Keep what the program wrote beside its working directory."""
        (self.place / "stdout").write_bytes(stdout)
        (self.place / "stderr").write_bytes(stderr)

    def tree(self) -> dict[str, bytes]:
        """All files of the working directory by path. Raises ValueError when they are too many bytes."""
        left, out = LARGEST_TREE, {}
        for path in self._files():
            left -= path.lstat().st_size
            if left < 0:
                raise ValueError(f"the workspace has more than {LARGEST_TREE} bytes to compare")
            name = path.relative_to(self.work).as_posix()
            out[name] = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        return out

    def _files(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.work):
            folders[:] = sorted(name for name in folders if name not in (".git", "__pycache__", "node_modules"))
            for name in sorted(names):
                path = Path(folder, name)
                if path.is_symlink() or path.is_file():
                    yield path

    def remove(self) -> None:
        """Remove it all, also what the program made read-only."""

        def again(function: object, path: str, fault: object) -> None:
            for one in (os.path.dirname(path), path):
                if not os.path.islink(one):
                    with suppress(OSError):
                        os.chmod(one, stat.S_IRWXU)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(path)

        shutil.rmtree(self.place, onerror=again)
        if self.place.exists():
            _log.warning("%s cannot be removed", self.place)
