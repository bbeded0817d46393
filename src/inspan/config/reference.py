"""Writes docs/recipes.md from the recipe's own schema: `python -m inspan.config.reference > docs/recipes.md`."""

from __future__ import annotations

import inspect
import sys
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from inspan.config import toml
from inspan.config.recipe import Recipe
from inspan.config.sections import OBJECTIVES, Agent, Arm, Reward, Section, Stage, Weight

INTRO = """\
# Recipes

<!-- Written by `make docs` from the schema in src/inspan/config; a test checks that it is current. -->

A recipe is one TOML file with everything that a run depends on. Unknown keys fail and name the nearest known one;
`inspan train RECIPE --dry-run` prints the resolved recipe.

```toml
name = "mine"
extends = "swarm.toml"           # start from another recipe: tables merge, everything else replaces

[train]
lr = 1e-4

[set]                            # dotted paths, applied last, as --set does
"rewards.1.weight" = 0
```

On the command line `--set train.lr=1e-4 --set rewards.1.weight=0` overrides keys; values are TOML, and what is not is a
string (`--set model=tiny`). Relative paths are relative to the recipe; those of `--set` to the working directory.
A run resumes only under a recipe that differs in nothing but `name`, `eval`, `train.updates`, `train.checkpoint_every`,
`rollout.retries`, `limits.timeout_s`, `engine.threads`, `engine.max_queue` and where the user's files lie.

[P] stated by the authors of a paper, [C] found in their code, [D] our own default where every source is silent.
"""


def reference() -> str:
    """The page."""
    fields = Recipe.model_fields
    simple = {k: f for k, f in fields.items() if not _section(f) and k not in ("agents", "rewards")}
    parts = [INTRO, _table("The recipe itself", "", "Keys before the first table.", simple)]
    for name, field in fields.items():
        if name == "agents":
            parts.append(_of("agents.ROLE", Agent))
            parts.append(_of("agents.ROLE.stages", Stage, many=True))
        elif name == "rewards":
            parts.append(_of("rewards", Reward, many=True))
            parts.append(_of("rewards.weight", Weight))
        elif section := _section(field):
            parts.append(_of(name, section))
            for inner, inside in section.model_fields.items():
                if deeper := _section(inside):
                    parts.append(_of(f"{name}.{inner}", deeper))
            if name == "train":
                parts.append(_objectives())
            if name == "eval":
                parts.append(_of("eval.arms.NAME", Arm))
    return "\n".join(parts)


def _of(name: str, section: type[BaseModel], *, many: bool = False) -> str:
    head = f"`[[{name}]]`" if many else f"`[{name}]`"
    return _table(head, name, inspect.cleandoc(section.__doc__ or ""), section.model_fields)


def _table(head: str, name: str, about: str, fields: dict[str, FieldInfo]) -> str:
    rows = [f"## {head}\n\n{about}\n", "| key | type | default | what |", "|---|---|---|---|"]
    for key, field in fields.items():
        if _section(field):
            continue
        cells = (field.alias or key, kind(field), default(field), field.description or "")
        rows.append("| `{}` | {} | {} | {} |".format(*(cell.replace("|", "\\|") for cell in cells)))
    return "\n".join(rows) + "\n"


def _objectives() -> str:
    rows = ["### Objectives\n", "| `objective` | its own `aggregation` | `objective_params` |", "|---|---|---|"]
    for name, (aggregation, params) in OBJECTIVES.items():
        rows.append(f"| `{name}` | `{aggregation}` | {', '.join(f'`{p}`' for p in params)} |")
    return "\n".join(rows) + "\n"


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if inspect.isclass(kind) and issubclass(kind, Section) and kind is not Weight else None


def kind(field: FieldInfo) -> str:
    """A field's type in words, with its bounds."""
    words = _words(field.annotation)
    return words + _bounds(field.metadata)


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [f"{signs[k]} {v:g}" for m in metadata for k in signs if (v := getattr(m, k, None)) is not None]
    # 2**63 is there to refuse what cannot be a seed; nobody needs to read it.
    shown = [text for text in found if "e+18" not in text]
    return f" {', '.join(shown)}" if shown else ""


def _words(annotation: Any) -> str:
    plain = {int: "whole number", float: "number", str: "string", bool: "boolean"}
    if annotation in plain:
        return plain[annotation]
    if annotation is Weight:
        return "number or table"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(args[0])
    if origin is Literal:
        return ", ".join(f"`{toml.value(a)}`" for a in args)
    if origin is tuple:
        return f"{len(args)} {_words(args[0])}s"
    if origin is list:
        return f"list of {_words(args[0])}s"
    if origin is dict:
        return "table" if args[1] is Any else f"table of {_words(args[1])}s"
    if origin is UnionType:
        return " or ".join(_words(a) for a in args)
    return "table"


def default(field: FieldInfo) -> str:
    """A field's default as TOML."""
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", by_alias=True)
    if isinstance(value, dict):
        value = {k: v.model_dump(exclude_defaults=True) if isinstance(v, BaseModel) else v for k, v in value.items()}
    return f"`{toml.value(value)}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
