"""Making a base model: tokenizer, copy phase, demonstrations, model card. Contract: the seed decides every bit of it.

A training that was stopped goes on from its last checkpoint when it is run again with the same output folder.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from inspan.errors import InputError
from inspan.gateway.render import ChatML
from inspan.harness.search.tokens import counter
from inspan.learner.checkpoint import latest, load_checkpoint, save_checkpoint
from inspan.learner.model import load_model, prepare
from inspan.learner.optim import OptimSettings
from inspan.learner.sft import Example, Phase, Source, Trainer
from inspan.tasks.facts import atlas, questions
from inspan.tasks.facts.world import INFOBOX, PROSE, build
from inspan.warmstart import fantasy, searches
from inspan.warmstart.card import About, about_library, about_search, write_card
from inspan.warmstart.demos import SUBAGENT_SYSTEM, Conversation, Expert, Habits
from inspan.warmstart.recipe import PhaseSection, WarmstartRecipe, load
from inspan.warmstart.source import Worlds, converse, render, source_of
from inspan.warmstart.tokenizer import CONTROL, SCAFFOLD, add_scaffold, save_tokenizer, train_tokenizer

SAMPLE_CONVERSATIONS = 3000
HELD_OUT_ROWS = 24
SAY_EVERY = 100
MICRO_TOKENS = 2048


def run(
    path: Path, *, overrides: Sequence[str] = (), out: Path | None = None, write: Callable[[str], None] = print
) -> Path:
    """Make the base model of a warm-start recipe in `out` (default: `runs/<name>`); returns the model's folder."""
    import torch

    recipe = load(path, overrides)
    folder = out or Path("runs") / recipe.name
    folder.mkdir(parents=True, exist_ok=True)
    _same_recipe(recipe, folder)
    torch.set_num_threads(recipe.threads)
    started = time.monotonic()
    tokenizer = _tokenizer(recipe, folder)
    renderer = ChatML(tokenizer, compact=True)
    vocabulary = tokenizer.get_vocab_size()
    model: Any = prepare(grown_model(recipe.start, tokenizer) if recipe.start else new_model(recipe, vocabulary))
    family = of_search(recipe, folder) if recipe.agent == "search" else of_library(recipe)
    phases = [_phase(recipe, section, family, renderer, vocabulary) for section in recipe.phases]
    trainer = Trainer(model, phases, seed=recipe.seed, token_budget=MICRO_TOKENS)
    checkpoints = folder / "checkpoints"
    if (found := latest(checkpoints)) is not None:
        write(f"going on from step {load_checkpoint(found, trainer).step}")
    held_out = family.held_out(renderer)
    for step, losses in _stepping(trainer):
        if step % SAY_EVERY == 0:
            name = recipe.phases[min(trainer.phase, len(recipe.phases) - 1)].name
            write(f"step {step} {name} loss {fmean(losses):.4f} {time.monotonic() - started:.0f} s")
        if step % recipe.checkpoint_every == 0:
            save_checkpoint(checkpoints, trainer, {}, step=step, keep=2)
            write(json.dumps({"step": step, "held_out": accuracies(model, held_out)}))
    target = folder / "model"
    model.save_pretrained(target)
    save_tokenizer(tokenizer, target)
    command = " ".join([f"inspan warmstart recipes/base/{path.name}", *(f"--set {text}" for text in overrides)])
    write_card(target, recipe, family.about(), accuracies(model, held_out), shape_of(model), command)
    return target


def _stepping(trainer: Trainer) -> Iterator[tuple[int, list[float]]]:
    """(step, the losses of the last `SAY_EVERY` steps) after each step."""
    losses: list[float] = []
    for metrics in trainer.run():
        losses = [*losses[-SAY_EVERY + 1 :], metrics["loss"]]
        yield int(metrics["step"]), losses


def _same_recipe(recipe: WarmstartRecipe, folder: Path) -> None:
    """Refuse to go on with another recipe's training; what never got to a checkpoint is begun anew."""
    file = folder / "recipe.json"
    text = recipe.model_dump_json(exclude={"threads", "checkpoint_every"}, indent=1)
    if file.exists() and file.read_text(encoding="utf-8") != text:
        if latest(folder / "checkpoints") is not None:
            raise InputError(
                "the folder holds a training by another recipe", where=str(folder), hint="choose another --out"
            )
        (folder / "tokenizer.json").unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between the agents that are demonstrated: rows to train on, held-out rows, words for the card."""

    source: Callable[[PhaseSection, ChatML, int, int], Source]  # phase, renderer, vocabulary, first id of copy rows
    held_out: Callable[[ChatML], dict[str, list[Example]]]
    about: Callable[[], About]


def of_library(recipe: WarmstartRecipe) -> Family:
    """The agents of a library: swarm and single."""

    def source(phase: PhaseSection, renderer: ChatML, vocabulary: int, first: int) -> Source:
        return source_of(recipe, phase, renderer, vocabulary, first=first)

    return Family(source, held_out_rows, lambda: about_library(recipe, spawn_rates(recipe)))


def of_search(recipe: WarmstartRecipe, folder: Path) -> Family:
    """The search agent, which counts tokens by the model's tokenizer."""
    count = counter(str(folder))

    def source(phase: PhaseSection, renderer: ChatML, vocabulary: int, first: int) -> Source:
        return searches.source_of(recipe, phase, renderer, vocabulary, first, count)

    def held_out(renderer: ChatML) -> dict[str, list[Example]]:
        return searches.held_out_rows(recipe, renderer, count, HELD_OUT_ROWS)

    return Family(source, held_out, lambda: about_search(recipe))


def _tokenizer(recipe: WarmstartRecipe, folder: Path) -> Tokenizer:
    """Train the tokenizer on demonstrations and place names, or take the one that is there already."""
    file = folder / "tokenizer.json"
    if not file.exists():
        scaffold = searches.SCAFFOLD if recipe.agent == "search" else ()
        if recipe.start:
            made = Tokenizer.from_file(str(start_folder(recipe.start) / "tokenizer.json"))
        else:
            made = train_tokenizer(_texts(recipe), recipe.shape.vocabulary - len(scaffold))
        add_scaffold(made, scaffold).save(str(file))
    return Tokenizer.from_file(str(file))


def start_folder(name: str) -> Path:
    """The folder of a model to go on from: a path, or a model that ships with Inspan."""
    path = Path(name) if Path(name).is_dir() else Path(str(resources.files("inspan"))) / "models" / name
    if not (path / "tokenizer.json").is_file():
        raise InputError("no such model", where=f"start = {name!r}", hint="give a folder, or `tiny`")
    return path


def grown_model(start: str, tokenizer: Tokenizer) -> Any:
    """The weights of a model, with embeddings for the tokens that its tokenizer lacks: means of their pieces'."""
    import torch

    folder = start_folder(start)
    before = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = before.get_vocab_size()
    model: Any = load_model(folder)
    model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        for token in range(known, tokenizer.get_vocab_size()):
            pieces = before.encode(tokenizer.decode([token], skip_special_tokens=False), add_special_tokens=False).ids
            rows[token] = rows[pieces].mean(0)
    return model


def _texts(recipe: WarmstartRecipe) -> Iterator[str]:
    """What the tokenizer is trained on, without the scaffolding that has tokens of its own."""
    phase = next((p for p in recipe.phases if p.kind == "demos"), None)
    if phase is None or recipe.agent != "library":
        hint = "the search agent's base goes on from a library agent's: start = \"tiny\""
        raise InputError("a tokenizer is trained on a library agent's demonstrations", where=recipe.name, hint=hint)
    scaffold = re.compile("|".join(re.escape(text) for text in SCAFFOLD))
    worlds, rng = Worlds(recipe.worlds), random.Random(f"tokenizer {recipe.seed}")
    for _ in range(SAMPLE_CONVERSATIONS):
        talk = converse(rng, worlds, phase, recipe.real_share)
        for message in talk.messages:
            yield message["role"]
            yield from (piece for piece in scaffold.split(_text(message)) if piece)
    yield from atlas.other_names() * 2
    yield from fantasy.WORDS * 20
    yield from ["tools: search(query) read(page) create_subagent(name, system_prompt) assign_task(agent, prompt)"] * 500


def _text(message: dict[str, Any]) -> str:
    calls = [
        f'{SCAFFOLD[0]}{call["name"]}", "arguments": {call["arguments"]}' for call in message.get("tool_calls", ())
    ]
    return "\n".join([message.get("content") or "", *calls])


def new_model(recipe: WarmstartRecipe, vocabulary: int) -> Any:
    """A Llama of the recipe's shape with random weights from its seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = recipe.shape
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=CONTROL.index("<|im_end|>"),
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def shape_of(model: Any) -> str:
    """The number of parameters (tied ones once) and the shape, in words."""
    count, config = sum(p.numel() for p in model.parameters()), model.config
    layers, width, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    return f"{count:,} parameters ({layers} layers, width {width}, vocabulary {vocabulary})"


def _phase(recipe: WarmstartRecipe, section: PhaseSection, family: Family, renderer: ChatML, vocabulary: int) -> Phase:
    optim = OptimSettings(
        lr=section.lr,
        betas=(0.9, 0.98),
        weight_decay=0.01,
        warmup=section.warmup,
        schedule="linear",
        floor=section.floor,
    )
    source = family.source(section, renderer, vocabulary, len(CONTROL))
    return Phase(section.name, source, section.steps, recipe.batch_tokens, optim)


def held_out_rows(renderer: ChatML) -> dict[str, list[Example]]:
    """Clean demonstrations on entities that training never saw."""
    world = build(atlas.entities("held_out"), seed=1, layouts=(INFOBOX, PROSE), long_share=0.12)
    rng = random.Random("held out")
    expert = Expert(world, rng, Habits(fault=0.0, budget=0.0, partial=0.0, serial=0.0))

    def task(kind: str, count: int = 1) -> Any:
        return questions.make(world, kind, rng, id="held", widths=questions.Widths((count, count), (count, count)))

    makers: dict[str, Callable[[], Conversation]] = {
        "subagent": lambda: expert.alone(task("wide"), system=SUBAGENT_SYSTEM),
        "deep": lambda: expert.alone(task("deep"), system=SUBAGENT_SYSTEM),
        "single_5": lambda: expert.alone(task("wide", 5)),
        "orchestrator_9": lambda: expert.delegate(task("wide", 9)),
    }
    return {name: [render(renderer, make()) for _ in range(HELD_OUT_ROWS)] for name, make in makers.items()}


def accuracies(model: Any, held_out: dict[str, list[Example]]) -> dict[str, dict[str, float]]:
    """Teacher-forced accuracy a token and a whole trajectory, by kind of held-out row."""
    import torch

    found: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for name, rows in held_out.items():
            right = [_hits(model, row) for row in rows]
            tokens = [hit for hits in right for hit in hits]
            found[name] = {"token": round(fmean(tokens), 4), "trajectory": round(fmean(all(hits) for hits in right), 4)}
    return found


def _hits(model: Any, row: Example) -> list[bool]:
    import torch

    ids = torch.tensor([row.tokens])
    best = model(input_ids=ids).logits[0, :-1].argmax(-1)
    return [bool(best[i - 1] == row.tokens[i]) for i, weight in enumerate(row.weights) if weight]


def spawn_rates(recipe: WarmstartRecipe, count: int = 1000) -> dict[str, float]:
    """The share of the last phase's orchestrator demonstrations that delegate, by kind of question."""
    phase = recipe.phases[-1]
    worlds, rng = Worlds(recipe.worlds), random.Random("spawn rates")
    only = phase.model_copy(update={"roles": {"orchestrator": 1.0}})
    rates: dict[str, float] = {}
    for kind in [*phase.kinds, "all"]:
        some = only if kind == "all" else only.model_copy(update={"kinds": {kind: 1.0}})
        talks = [converse(rng, worlds, some, recipe.real_share) for _ in range(count // 4)]
        rates[kind] = round(fmean(_delegates(talk) for talk in talks), 3)
    return rates


def _delegates(talk: Conversation) -> bool:
    return any(call["name"] == "assign_task" for message in talk.messages for call in message.get("tool_calls", ()))
