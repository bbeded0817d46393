"""Turning validation faults into sentences. Contract: every fault names its file and key path, what was given and what
was expected; an unknown key names the nearest known one, or the section that it belongs to.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from inspan.config.recipe import Recipe, nearest
from inspan.errors import RecipeError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "string_too_short": "a non-empty string",
    "missing": "a value, since the key is required",
}

_BOUNDS = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}


def explain(error: ValidationError, data: Mapping[str, Any], source: str, origin: Mapping[tuple, str]) -> RecipeError:
    """One RecipeError for all faults: on one line when there is one, else one line each."""
    lines = [(_source(fault["loc"], source, origin), _sentence(fault)) for fault in error.errors()]
    hint = "`inspan train RECIPE --dry-run` prints the resolved recipe; docs/recipes.md lists every key"
    if len(lines) == 1:
        return RecipeError(lines[0][1], where=lines[0][0], hint=hint)
    text = "".join(f"\n  {where}: {sentence}" for where, sentence in lines)
    return RecipeError(f"{len(lines)} faults{text}\n ", where=source, hint=hint)


def _sentence(fault: ErrorDetails) -> str:
    loc, kind, given = fault["loc"], fault["type"], fault["input"]
    path = dotted(loc)
    if kind == "extra_forbidden":
        return _unknown(loc)
    prefix = f"{path}: " if path else ""
    if kind in ("combo", "name"):
        return prefix + fault["msg"]
    if kind == "weight":
        return f"{prefix}given {show(given)}, {fault['msg']}"
    context = fault.get("ctx", {})
    if kind == "missing":
        return f"{prefix}missing; expected {_EXPECTED[kind]}"
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        return f"{prefix}given {show(given)}, expected a number {sign} {context[name]}"
    if kind == "literal_error":
        options = str(context["expected"])
        close = (
            nearest(given, [o.strip("' ") for o in options.replace(" or ", ",").split(",")])
            if isinstance(given, str)
            else None
        )
        return f"{prefix}given {show(given)}, expected {options}" + (f'; did you mean "{close}"?' if close else "")
    if kind == "too_short":
        return f"{prefix}given an empty list, expected at least {context['min_length']} entry"
    expected = _EXPECTED.get(kind) or fault["msg"]
    return f"{prefix}given {show(given)}, expected {expected}"


def _unknown(loc: tuple[int | str, ...]) -> str:
    key, parent = str(loc[-1]), loc[:-1]
    known = keys_of(model_at(parent))
    if close := nearest(key, known):
        return f'{dotted(loc)}: unknown key; did you mean "{dotted((*parent, close))}"?'
    elsewhere = [path for path in _all_paths(Recipe, ()) if path[-1] == key]
    if elsewhere:
        return f'{dotted(loc)}: unknown key; did you mean "{dotted(elsewhere[0])}"?'
    place = f"[{dotted(parent)}]" if parent else "a recipe"
    return f"{dotted(loc)}: unknown key; {place} knows {', '.join(known)}"


def dotted(loc: tuple[int | str, ...]) -> str:
    """A key path as the user writes it: rewards.1.weight."""
    return ".".join(str(part) for part in loc)


def show(value: Any) -> str:
    """A value as the user wrote it, with its type where that is the point."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return f'"{text}" (a string)'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return str(value)


def keys_of(model: type[BaseModel] | None) -> list[str]:
    """The keys that a section knows, as written in TOML."""
    return [f.alias or name for name, f in model.model_fields.items()] if model else []


def model_at(path: tuple[int | str, ...], model: type[BaseModel] = Recipe) -> type[BaseModel] | None:
    """The section at a key path, walking through lists and tables of sections."""
    current: Any = model
    for part in path:
        if isinstance(current, type) and issubclass(current, BaseModel):
            fields = {f.alias or name: f.annotation for name, f in current.model_fields.items()}
            current = fields.get(str(part))
        elif get_origin(current) in (list, dict):
            current = get_args(current)[-1]
        else:
            return None
        if get_origin(current) is types.UnionType:
            current = next((a for a in get_args(current) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _all_paths(model: type[BaseModel], path: tuple[str, ...]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        here = (*path, field.alias or name)
        paths.append(here)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths.extend(_all_paths(field.annotation, here))
    return paths


def _source(loc: tuple[int | str, ...], source: str, origin: Mapping[tuple, str]) -> str:
    """The file (or --set) that a faulty key comes from: the longest key path that is known."""
    for end in range(len(loc), 0, -1):
        if loc[:end] in origin:
            return origin[loc[:end]]
    return source
