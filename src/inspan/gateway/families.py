"""Which renderer of the package `renderers` a model gets. Contract: one that would render it otherwise is not taken.

A model is known by its hub name, as the package lists it, or by the `model_type` of its config.json. Models of one type
may have different chat templates: so by type, a renderer is taken only if it renders probe conversations exactly as the
model's own template does. Where none fits, or the package is missing, the template is used and the log says so.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from inspan.errors import InspanError, ModelError
from inspan.gateway.packaged import GuardedTokenizer, PackagedRenderer
from inspan.gateway.template import TemplateRenderer
from inspan.trace.records import Message

_log = logging.getLogger("inspan.gateway")
PREFIX: Final = "renderers:"
"""Before a family's name in `inspan_renderer`: that renderer of the package, without a probe."""
HINT: Final = "pip install 'inspan[renderers]'"

TYPES: Final[dict[str, tuple[str, ...]]] = {
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "gemma4": ("gemma4",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "glm_moe_dsa": ("glm-5", "glm-5.1", "glm-5.3"),
    "gpt_oss": ("gpt-oss",),
    "kimi_k2": ("kimi-k2",),
    "kimi_k25": ("kimi-k2.5",),
    "llama": ("llama-3",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_5": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_5_text": ("qwen3.5", "qwen3.6", "qwen3.8"),
    "qwen3_moe": ("qwen3",),
}
"""Values of config.json's `model_type`, and the package's renderers that such a model may have."""

_ASK: Final[Message] = {"role": "user", "content": "What is it?"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
_CALL: Final = {"id": "call_0", "name": "look", "arguments": '{"what": "it"}'}
_PROBES: Final[tuple[list[Message], ...]] = (
    [{"role": "system", "content": "Be good."}, _ASK],
    [_ASK, {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}, {"role": "user", "content": "Sure?"}],
    [
        {"role": "system", "content": "Be good.", "tools": [_TOOL]},
        _ASK,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": "found", "tool_call_id": "call_0"},
    ],
)


def model_type(folder: Path) -> str:
    """The `model_type` that a model folder's config.json names, or ""."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""


def is_known(path: str, tokenizer: Any) -> bool:
    """Whether a model (its folder or hub name) is of a family that the package may render."""
    kind = model_type(Path(path))
    if kind == "llama":  # so many models are: only those of Llama 3 have its headers
        return tokenizer.token_to_id("<|start_header_id|>") is not None
    return kind in TYPES or _listed(_hub_name(path)) is not None


def packaged_for(tokenizer: Any, named: str = "") -> PackagedRenderer | None:
    """The package's renderer of a transformers tokenizer; None, with a line in the log, when it has none.

    `named` is one that the model's files ask for; raises `ModelError` when that cannot be had.
    """
    path = tokenizer.name_or_path or "the tokenizer"
    if importlib.util.find_spec("renderers") is None:
        if named:
            raise ModelError(f"inspan_renderer is {PREFIX + named!r}, and renderers is not installed", where=path,
                             hint=HINT)  # fmt: skip
        _log.warning("%s: the package renderers is not installed (%s): its chat template is used", path, HINT)
        return None
    listed = named or _listed(_hub_name(path))
    if listed:
        try:
            return _made(tokenizer, listed, {}, _hub_name(path))
        except Exception as error:  # the package asserts what it needs, and may want files of the hub
            if named:
                raise ModelError(f"the renderer {named!r} cannot be had: {error}", where=path) from error
            _log.warning("%s: the renderer %s cannot be had (%s): its chat template is used", path, listed, error)
            return None
    for family in TYPES.get(model_type(Path(path)), ()):
        for made in _variants(tokenizer, family):
            if _agrees(made, tokenizer):
                return made
    _log.warning("%s: no renderer of the package renders as its chat template does: the template is used", path)
    return None


def _hub_name(path: str) -> str:
    """The hub name of a path: itself, or as the hub's cache has it in its folders' names; "" of other folders."""
    cached = re.search(r"models--([^/\\]+)--([^/\\]+)[/\\]snapshots", path)
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return "" if Path(path).is_dir() else path


def _listed(name: str) -> str | None:
    """The renderer that the package lists for a hub name."""
    if not name or importlib.util.find_spec("renderers") is None:
        return None
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(name)


def _variants(tokenizer: Any, family: str) -> Iterator[PackagedRenderer]:
    """A family's renderer as it is by default, then with thinking on and off where that can be chosen."""
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        try:
            yield _made(tokenizer, family, options, "")
        except Exception as error:  # the package asserts what it needs, and may want files of the hub
            _log.debug("the renderer %s %s cannot be had: %s", family, options, error)


def _made(tokenizer: Any, family: str, options: dict[str, Any], name: str) -> PackagedRenderer:
    from pydantic import TypeAdapter
    from renderers import RendererConfig
    from renderers.base import create_renderer

    guarded = GuardedTokenizer(tokenizer, name)
    config: Any = TypeAdapter(RendererConfig).validate_python({"name": family, **options})
    return PackagedRenderer(create_renderer(guarded, config), guarded, family)


def _agrees(made: PackagedRenderer, tokenizer: Any) -> bool:
    """Whether a renderer renders the probes, and their generation prompts, as the tokenizer's own template does."""
    try:
        template = TemplateRenderer(tokenizer)
        return all(made.seen(made.render(probe).ids) == template.render(probe, opening=True).text for probe in _PROBES)
    except InspanError:
        return False
