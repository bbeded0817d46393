"""Multi-turn updates with tools, for `vs_trl.py`: TRL's `environment_factory` against Inspan's whole road.

The task: roll a die until the environment says "done", then say so: two to six rolls, so episodes are uneven. Both
sides use Qwen2.5's chat template, the same tool schema, and one model that a little supervised training taught the
game. Ours is the road that a recipe takes: harness with the ordinary client, gateway, trace, credit, learner.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from inspan.credit.registry import credit_batch
from inspan.engine.base import SamplingParams
from inspan.engine.torch_engine import TorchEngine
from inspan.gateway.base import Limits, Role
from inspan.gateway.gateway import Gateway
from inspan.gateway.template import TemplateRenderer
from inspan.harness.base import Context
from inspan.harness.loop import Agent, ToolRequest, TurnResult, connect, run_loop
from inspan.learner.learner import Learner, LearnerSettings
from inspan.learner.losses import make_objective
from inspan.learner.model import prepare
from inspan.learner.optim import OptimSettings
from inspan.learner.sft import Example, Phase, Trainer
from inspan.rollout.load import LoadedHarness
from inspan.rollout.run import RolloutJob, Runner
from inspan.tasks.base import Task
from inspan.trace.records import Scored
from trl_peer import (
    GROUP,
    PROMPTS,
    VOCABULARY,
    Rate,
    compare,
    mark,
    rate_of,
    reward,
    tiny_llama,
    trl_rate,
    trl_trainer,
)

COMPLETION, LEARNING_RATE = 320, 1e-5  # a small rate: the episodes keep their shape
QUESTIONS = [f"Roll die d{i} until it is done." for i in range(PROMPTS)]


class Dice:
    """The environment, as TRL wants it: `reset` and methods that are tools."""

    def reset(self, **_: Any) -> None:
        """Begin an episode."""
        self._left = random.randint(2, 6)

    def roll(self, die: str) -> str:
        """Roll a die.

        Args:
            die: Which die.

        Returns:
            What it shows.
        """
        self._left -= 1
        return "done" if self._left <= 0 else f"shows {random.randint(1, 6)}, roll again"


def schema() -> dict[str, Any]:
    """The tool's schema, made by the function that TRL uses."""
    from transformers.utils import get_json_schema

    return get_json_schema(Dice().roll)


def transcript(rng: Any, question: str, tokenizer: Any) -> tuple[list[str], list[bool]]:
    """An episode in pieces of text, and which of them the model writes."""
    opening = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(opening, tools=[schema()], add_generation_prompt=True, tokenize=False)
    pieces, written = [text], [False]
    die = question.split()[2]
    for left in range(int(rng.integers(2, 7)) - 1, -1, -1):
        call = f'<tool_call>\n{{"name": "roll", "arguments": {{"die": "{die}"}}}}\n</tool_call><|im_end|>'
        said = "done" if not left else f"shows {int(rng.integers(1, 7))}, roll again"
        shown = f"\n<|im_start|>user\n<tool_response>\n{said}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        pieces += [call, shown]
        written += [True, False]
    return [*pieces, "It is done.<|im_end|>"], [*written, True]


def make_tokenizer() -> Any:
    """A byte-level BPE of 512 tokens, trained on the game, with Qwen2.5's chat template."""
    import numpy as np
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from trl.chat_template_utils import qwen2_5_chat_template

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    names: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "padding_side": "left"}
    draft = PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    draft.chat_template = qwen2_5_chat_template
    rng = np.random.default_rng(0)
    plain.train_from_iterator(("".join(transcript(rng, q, draft)[0]) for q in QUESTIONS for _ in range(4)), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, **names)
    tokenizer.chat_template = qwen2_5_chat_template
    return tokenizer


def taught_model(tokenizer: Any, steps: int = 100) -> Any:
    """A tiny model that plays the game, by supervised training on episodes."""

    def draw(rng: Any) -> Example:
        pieces, written = transcript(rng, QUESTIONS[int(rng.integers(PROMPTS))], tokenizer)
        ids = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
        weights = [float(mine) for piece, mine in zip(ids, written, strict=True) for _ in piece]
        return Example(tuple(t for piece in ids for t in piece), tuple(weights))

    model = tiny_llama(pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id)
    phase = Phase("game", draw, steps, 2048, OptimSettings(lr=5e-3, warmup=10, schedule="cosine"))
    for _ in Trainer(prepare(model), [phase]).run():
        pass
    return model


async def play(task: Task, ctx: Context) -> str:
    """The agent: an ordinary tool loop around the ordinary client."""
    endpoint, dice = ctx.model("main"), Dice()
    dice.reset()

    async def execute(requests: Any, _: int | None) -> TurnResult:
        texts = {r.id: answer(r) for r in requests}
        return TurnResult(texts, direct=len(texts))

    def answer(request: ToolRequest) -> str:
        try:
            return dice.roll(**request.arguments) if request.name == "roll" and request.arguments else "error"
        except TypeError as error:
            return f"error: {error}"

    messages = [{"role": "user", "content": task.prompt}]
    agent = Agent(connect(endpoint), endpoint.name, messages, [schema()], ctx.max_tokens)
    return (await run_loop(agent, execute, budget=ctx.budget))[0]


async def inspan_rate(source: Any, tokenizer: Any, steps: int) -> Rate:
    """The whole road, the first update left out."""
    model = prepare(tiny_llama(pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id))
    model.load_state_dict(source.state_dict())
    engine = TorchEngine({"policy": model}, slots=PROMPTS * GROUP)
    runner = Runner(
        gateway=Gateway(engine, TemplateRenderer(tokenizer)),
        harness=LoadedHarness("dice", play, True, "1"),
        roles=[Role("main", "policy", True)],
        limits=Limits(10, None, None, None),
        sampling=SamplingParams(max_tokens=64),
        timeout_s=60.0,
    )
    objective = make_objective("grpo", {"eps": 0.2}, aggregation="rollout")
    learner = Learner(model, objective, LearnerSettings(optim=OptimSettings(lr=LEARNING_RATE, betas=(0.9, 0.999))))
    tasks = [Task(f"t{i}", question, "done") for i, question in enumerate(QUESTIONS)]
    random.seed(0)
    marks = [mark(0)]
    for step in range(steps + 1):
        jobs = [
            RolloutJob(f"{step}/{g}/{m}", task, f"{step}/{g}", m, 0, seed=(step * PROMPTS + g) * GROUP + m)
            for g, task in enumerate(tasks)
            for m in range(GROUP)
        ]
        rollouts = await asyncio.gather(*[runner.run(job) for job in jobs])
        scored = [Scored(r, reward([t for n in r.nodes for t in n.tokens[n.start :]])) for r in rollouts]
        groups = [scored[i : i + GROUP] for i in range(0, len(scored), GROUP)]
        trained = learner.update(credit_batch("group_mean_std", groups).credits, 0.0)["trained_tokens"]
        await engine.load("policy", learner.weights())
        marks.append(mark(marks[-1][2] + trained))
    await runner.close()
    await engine.close()
    return rate_of(marks[1:])


def multi_turn(steps: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """The rows."""
    tokenizer = make_tokenizer()
    source = taught_model(tokenizer)

    def make(directory: str, **changes: Any) -> Any:
        model = tiny_llama(pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id)
        model.load_state_dict(source.state_dict())
        random.seed(0)
        prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
        changes |= {"learning_rate": LEARNING_RATE, "environment_factory": Dice, "max_tool_calling_iterations": 9}
        return trl_trainer(directory, model, tokenizer, prompts, completion=COMPLETION, **changes)

    return compare(
        f"multi-turn updates with tools, {PROMPTS * GROUP} episodes, {{ours}} and {{theirs}} trained tokens, "
        f"{threads} thread(s)",
        lambda: asyncio.run(inspan_rate(source, tokenizer, steps)),
        lambda: trl_rate(steps, make),
        rounds,
    )
