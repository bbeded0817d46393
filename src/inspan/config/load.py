"""Reading a recipe: file, `extends`, `[set]`, `--set`. Contract: a valid `Recipe`, or one `RecipeError` that names
every fault with its file and key path, what was given, what was expected, and the nearest known key.

`extends = "swarm.toml"` (relative to the file) starts from another recipe: tables merge, everything else replaces.
A `[set]` table holds dotted paths applied after that, as `--set` does: `[set]` / `"rewards.1.weight" = 0`.
Relative paths of tasks, corpus, model and program are relative to the file that names them; those of `--set` to the
caller.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from inspan.config import toml
from inspan.config.explain import explain
from inspan.config.recipe import Recipe
from inspan.errors import RecipeError

_WHOLE = (("tasks", "kinds"), ("tasks", "held_out_kinds"))
"""Tables that a recipe replaces as a whole: shares that must be read together."""

_EXAMPLE = "write it as --set section.key=value, e.g. --set train.lr=1e-4 or --set rewards.1.weight=0"


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file, with `overrides` ("a.b=c", values in TOML syntax) applied.

    Raises RecipeError: missing file, bad syntax, unknown key, wrong type, impossible combination.
    """
    path = Path(path)
    data, origin = _read(path, ())
    folder = str(path.resolve().parent)
    for text in overrides:
        keys, item = parse_override(text)
        _assign(data, keys, item, where=f"--set {text}")
        origin[keys] = f"--set {text}"
    search = data.setdefault("python_path", [])
    if isinstance(search, list) and folder not in search:
        data["python_path"] = [*search, folder]
    return from_dict(data, source=str(path), origin=origin)


def from_dict(data: Mapping[str, Any], *, source: str = "recipe", origin: Mapping[tuple, str] | None = None) -> Recipe:
    """A recipe from plain data; `source` and `origin` (key path → file) are what errors name."""
    try:
        return Recipe.model_validate(dict(data))
    except ValidationError as error:
        raise explain(error, data, source, origin or {}) from None


def dump_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML: every key with its value; loads back to an equal recipe."""
    return toml.dumps(recipe.model_dump(by_alias=True))


def parse_override(text: str) -> tuple[tuple[str | int, ...], Any]:
    """ "a.b=c" → (("a", "b"), value). The value is TOML; what is not TOML is taken as a string (`model=tiny`)."""
    path, equals, raw = text.partition("=")
    keys = tuple(int(part) if part.isdecimal() else part for part in path.strip().split("."))
    if not equals or not all(part != "" for part in keys):
        raise RecipeError("not an override", where=f"--set {text}", hint=_EXAMPLE)
    try:
        item = tomllib.loads(f"v = {raw}")
    except (ValueError, RecursionError):
        raw = raw.strip()
        if not raw or raw[0] in "\"'[{":
            raise RecipeError(f"{raw!r} is not a TOML value", where=f"--set {text}", hint=_EXAMPLE) from None
        return keys, raw
    if list(item) != ["v"]:
        raise RecipeError("more than one value", where=f"--set {text}", hint=_EXAMPLE)
    return keys, item["v"]


def _read(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[tuple, str]]:
    """Raw data of a file and of what it extends, and which file each key path comes from."""
    real = path.resolve()
    if real in chain:
        names = " → ".join(p.name for p in (*chain, real))
        raise RecipeError(
            f"recipes extend each other in a circle: {names}", where=str(path), hint="remove one `extends`"
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        hint = f"recipes in {path.parent}: {near}" if near else "give the path of a TOML recipe"
        raise RecipeError("no such recipe", where=str(path), hint=hint) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 (byte {error.start})", where=str(path), hint="save the file as UTF-8") from None
    except OSError as error:
        raise RecipeError(
            f"cannot be read: {error.strerror}", where=str(path), hint="give the path of a TOML file"
        ) from None
    except RecursionError:
        raise RecipeError("nested too deeply", where=str(path), hint="a recipe has tables of tables at most") from None
    except ValueError as error:  # also of numbers that Python does not read
        raise RecipeError(f"TOML syntax error: {error}", where=str(path), hint="mend that line") from None
    _anchor(data, real.parent)
    base, origin = _extended(data, path, (*chain, real))
    settings = data.pop("set", {})
    if not isinstance(settings, dict):
        raise RecipeError("`set` must be a table", where=str(path), hint='[set] then "rewards.1.weight" = 0')
    _merge(base, data, origin, str(path), ())
    for dotted, item in settings.items():
        keys = tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
        _assign(base, keys, item, where=f"{path} [set] {dotted}")
        origin[keys] = str(path)
    return base, origin


def _extended(data: dict[str, Any], path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[tuple, str]]:
    """What `extends` names, already read; empty when there is none."""
    if "extends" not in data:
        return {}, {}
    target = data.pop("extends")
    if not isinstance(target, str):
        raise RecipeError(f"extends: given {target!r}, expected the path of a recipe", where=str(path))
    return _read(path.parent / target, chain)


def _anchor(data: dict[str, Any], folder: Path) -> None:
    """Make the file's relative paths absolute, so that they mean the same wherever the recipe is used."""
    tasks = data.get("tasks")
    for table, key in ((tasks, "path"), (tasks, "corpus"), (data, "model")):
        if not isinstance(table, dict) or not isinstance(item := table.get(key), str) or not item:
            continue
        if key != "model" or ("/" in item and (folder / item).exists()):
            table[key] = str((folder / item).resolve())
    if isinstance(command := data.get("command"), dict):
        command.setdefault("folder", str(folder))
        if isinstance(template := command.get("template"), str) and template:
            command["template"] = str((folder / template).resolve())
        if isinstance(command.get("path"), list):
            command["path"] = [str((folder / p).resolve()) if isinstance(p, str) else p for p in command["path"]]
    if isinstance(data.get("python_path"), list):
        data["python_path"] = [str((folder / p).resolve()) if isinstance(p, str) else p for p in data["python_path"]]


def _merge(base: dict[str, Any], top: Mapping[str, Any], origin: dict[tuple, str], source: str, path: tuple) -> None:
    """Lay `top` over `base`: tables merge, everything else replaces."""
    for key, item in top.items():
        here = (*path, key)
        origin[here] = source
        if isinstance(item, dict) and isinstance(base.get(key), dict) and here not in _WHOLE:
            _merge(base[key], item, origin, source, here)
        else:
            base[key] = item
            _mark(item, origin, source, here)


def _mark(item: Any, origin: dict[tuple, str], source: str, path: tuple) -> None:
    """Note the source of everything inside a value."""
    children = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, child in children:
        origin[(*path, key)] = source
        _mark(child, origin, source, (*path, key))


def _assign(data: Any, keys: tuple[str | int, ...], item: Any, *, where: str) -> None:
    """Set one dotted path, making tables on the way; an index must exist already."""
    node = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        here = ".".join(map(str, keys[:depth]))
        if isinstance(node, list):
            if not isinstance(key, int) or key >= len(node):
                raise RecipeError(f"{here} has {len(node)} entries, no [{key}]", where=where, hint="indexes start at 0")
            slot: Any = key
        elif isinstance(node, dict):
            slot = str(key)
            if not last:
                node.setdefault(slot, {})
        else:
            raise RecipeError(f"{here} is a plain value, not a table", where=where, hint=f"set {here} as a whole")
        if last:
            node[slot] = item
        else:
            node = node[slot]
