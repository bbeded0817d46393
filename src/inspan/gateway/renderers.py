"""Which renderer a tokenizer needs. Contract: asked once per model; says what is missing when there is none.

In this order: what `tokenizer_config.json` names as `inspan_renderer`, for a known family the renderer of the package
`renderers` (or, where that cannot be had, its chat template), ChatML when the tokenizer has its control tokens, the
model's own chat template.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from inspan.errors import ModelError
from inspan.gateway.families import PREFIX, is_known, packaged_for
from inspan.gateway.packaged import PackagedRenderer, PackagedScribe
from inspan.gateway.render import ChatML, Renderer
from inspan.gateway.scribe import DeltaScribe, Scribe
from inspan.gateway.template import TemplateRenderer, TemplateScribe

AnyRenderer = Renderer | TemplateRenderer | PackagedRenderer
RENDERERS = ("chatml", "chatml-compact", "template")


def renderer_for(tokenizer_or_path: Any) -> AnyRenderer:
    """The renderer of a model folder, a hub id, a `tokenizers.Tokenizer` or a transformers tokenizer.

    Raises `ModelError`: "no chat template" when there is neither ChatML nor a template, or the files cannot be read.
    """
    if isinstance(tokenizer_or_path, str | Path):
        return _for_path(str(tokenizer_or_path))
    if isinstance(tokenizer_or_path, Tokenizer):
        return _chatml(tokenizer_or_path, "", "the tokenizer")
    return _for_transformers(tokenizer_or_path)


def described(renderer: AnyRenderer, folder: Path) -> dict[str, str]:
    """What of a model's rendering must be the same for two runs to be comparable: which renderer, and hashes of the
    files that it goes by ("" for one that is not there)."""
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else _setting(folder, "chat_template")
    tokenizer = folder / "tokenizer.json"
    return {
        "name": renderer.name,
        "template": _hash(json.dumps(text).encode()) if text else "",
        "tokenizer": _hash(tokenizer.read_bytes()) if tokenizer.is_file() else "",
    }


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def scribe_for(renderer: AnyRenderer) -> Scribe:
    """What lays requests onto the graph with this renderer."""
    if isinstance(renderer, PackagedRenderer):
        return PackagedScribe(renderer)
    return TemplateScribe(renderer) if isinstance(renderer, TemplateRenderer) else DeltaScribe(renderer)


def _for_path(path: str) -> AnyRenderer:
    folder = Path(path)
    file = folder / "tokenizer.json"
    if folder.is_dir() and not file.is_file():
        raise ModelError("there is no tokenizer.json", where=path, hint="give a folder with a fast tokenizer")
    if file.is_file():
        named = _setting(folder, "inspan_renderer")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ModelError(f"the tokenizer cannot be read: {error}", where=str(file)) from error
        whole = named == "template" or named.startswith(PREFIX) or (not named and is_known(path, tokenizer))
        if not whole and (named or _has_chatml(tokenizer)):
            return _chatml(tokenizer, named, path)
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        hint = "give a model folder or a hub id that can be reached"
        raise ModelError(f"the tokenizer cannot be loaded: {error}", where=path, hint=hint) from error
    return _for_transformers(loaded)


def _for_transformers(tokenizer: Any) -> AnyRenderer:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    where = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    if fast is None:
        raise ModelError("it is not a fast tokenizer", where=where, hint="give a model with a tokenizer.json")
    named = getattr(tokenizer, "init_kwargs", {}).get("inspan_renderer", "")
    if named.startswith(PREFIX) or (not named and is_known(where, fast)):
        packaged = packaged_for(tokenizer, named.removeprefix(PREFIX))
        if packaged is not None:
            return packaged
        if tokenizer.chat_template:
            return TemplateRenderer(tokenizer)
    if named != "template" and (named or _has_chatml(fast)):
        return _chatml(fast, named, where)
    return TemplateRenderer(tokenizer)


def _chatml(tokenizer: Tokenizer, named: str, where: str) -> ChatML:
    if named and named not in RENDERERS:
        raise ModelError(f"inspan_renderer is {named!r}", where=where, hint=f"known: {', '.join(RENDERERS)}")
    if not _has_chatml(tokenizer):
        raise ModelError("no chat template", where=where, hint="use a chat model, or a tokenizer with ChatML tokens")
    return ChatML(tokenizer, compact=named == "chatml-compact")


def _has_chatml(tokenizer: Tokenizer) -> bool:
    return all(tokenizer.token_to_id(text) is not None for text in ("<|im_start|>", "<|im_end|>"))


def _setting(folder: Path, name: str) -> Any:
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return ""
    try:
        return json.loads(config.read_text(encoding="utf-8")).get(name, "")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"tokenizer_config.json cannot be read: {error}", where=str(config)) from error
