"""Inspan against TRL's GRPOTrainer: the same tiny model, prompts and group size, on the CPU, in one run.

    python benchmarks/vs_trl.py [--threads 1] [--steps 4] [--rounds 2]

Prints one JSON object a row (`what`, `ours`, `peer`, `ratio`, `unit`): the two losses on one fixed batch (they must
agree to 1e-5), and trained tokens a second of whole updates: generation, rewards, loss, step, and the new weights in
the generator; single-turn (engine and learner), and multi-turn with tools (the whole road of a recipe). Rounds of the
two alternate and the fastest of each counts, since the machine may be busy; CPU time says the same with less noise.
Needs `pip install trl`. Prompts a step, group size and model are in `trl_peer.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import tempfile
from dataclasses import replace
from typing import Any

import inspan  # noqa: F401 (before torch: it sets how OpenMP threads wait)

# isort: split
import torch

from inspan.credit.registry import credit_batch
from inspan.engine.base import Sample, SamplingParams
from inspan.engine.torch_engine import TorchEngine
from inspan.learner.learner import Learner, LearnerSettings
from inspan.learner.losses import batch_loss, make_objective, sequence_log_ratio
from inspan.learner.model import prepare, token_logprobs
from inspan.learner.objectives import TokenBatch
from inspan.learner.optim import OptimSettings
from inspan.learner.packing import Row, pack
from inspan.trace.records import Call, ChainCredit, Node, Rollout, Scored, Session, Terminal
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

PROMPT_TOKENS, COMPLETION = 16, 40


def word_tokenizer() -> Any:
    """One token a word: "t0" … "t511"; t0 pads, t1 ends."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="t1", pad_token="t0", padding_side="left")


def prompts() -> list[tuple[int, ...]]:
    """Random prompts, the same for both."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(2, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()) for _ in range(PROMPTS)]


def single_turn_trainer(directory: str, **changes: Any) -> Any:
    """TRL's trainer on the random prompts."""
    texts = [" ".join(f"t{t}" for t in p) for p in prompts()]
    changes = {"learning_rate": 1e-3, **changes}
    return trl_trainer(directory, tiny_llama(), word_tokenizer(), texts, completion=COMPLETION, **changes)


# ---- the losses of the two on one fixed batch


def fixed_batch(model: Any, rows: int = 8) -> dict[str, Any]:
    """TRL's inputs: uneven completions, off-policy old log-probs, advantages of two groups."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, COMPLETION + 1, (rows,), generator=generator)
    ids = torch.randint(2, VOCABULARY, (rows, PROMPT_TOKENS + COMPLETION), generator=generator)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
    new = logits.gather(2, ids[:, PROMPT_TOKENS:, None])[:, :, 0]
    mask = (torch.arange(COMPLETION)[None] < lengths[:, None]).long()
    return {
        "prompt_ids": ids[:, :PROMPT_TOKENS],
        "prompt_mask": torch.ones(rows, PROMPT_TOKENS, dtype=torch.int64),
        "completion_ids": ids[:, PROMPT_TOKENS:] * mask,
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=generator),
        "old_per_token_logps": new + 0.3 * torch.randn(new.shape, generator=generator),
        "num_items_in_batch": mask.sum(),
    }


def inspan_loss(model: Any, inputs: dict[str, Any], name: str, params: dict[str, float], aggregation: str) -> float:
    """Our loss on the same batch."""
    lengths = inputs["completion_mask"].sum(1).tolist()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1).tolist()
    ends = [PROMPT_TOKENS + n for n in lengths]
    rows = [Row(tuple(r[:end]), tuple(range(PROMPT_TOKENS, end))) for r, end in zip(ids, ends, strict=True)]
    owner = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    behaviour = torch.cat([o[:n] for o, n in zip(inputs["old_per_token_logps"], lengths, strict=True)])
    advantage = inputs["advantages"][owner]
    logp, _ = token_logprobs(prepare(copy.deepcopy(model)), pack(rows))
    batch = TokenBatch(behaviour, advantage, torch.ones_like(advantage), owner, owner // 4)
    objective = make_objective(name, params, aggregation=aggregation, length=COMPLETION)
    if objective.needs_sequence:
        batch = replace(batch, sequence=sequence_log_ratio(logp, batch))
    return float(batch_loss(objective, logp, batch, objective.scales(batch))[0].detach())


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
CASES: list[tuple[str, dict[str, float], str, dict[str, Any]]] = [
    ("grpo", {"eps": 0.2}, "rollout", {}),
    ("grpo", {"eps": 0.2, "eps_high": 0.28}, "token", {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("dr_grpo", {"eps": 0.2}, "constant", {"loss_type": "dr_grpo"}),
    ("cispo", {"high": 1.3}, "token", {"loss_type": "cispo", "epsilon_high": 1.3}),
    ("gspo", {"eps": 0.02, "eps_high": 0.03}, "rollout", SEQUENCE),
]
"""Our objective, its parameters and aggregation; what asks TRL for the same."""


def losses() -> list[dict[str, Any]]:
    """Rows of the two losses on one fixed batch, for every objective that both have."""
    out = []
    for name, params, aggregation, changes in CASES:
        with tempfile.TemporaryDirectory() as directory:
            trainer = single_turn_trainer(directory, max_steps=1, **changes)
        trainer.current_gradient_accumulation_steps = 1
        inputs = fixed_batch(trainer.model)
        theirs = float(trainer._compute_loss(trainer.model, inputs).detach())
        ours = inspan_loss(trainer.model, inputs, name, params, aggregation)
        what = f"loss on one fixed batch: {name}, {aggregation}"
        out.append({"what": what, "ours": ours, "peer": theirs, "ratio": ours / theirs, "unit": "nats"})
    return out


# ---- whole updates, single-turn


async def sample_groups(engine: TorchEngine, step: int) -> list[ChainCredit]:
    """Sample, score and credit one batch, all requests in flight at once."""

    async def member(group: int, prompt: tuple[int, ...], index: int) -> Scored:
        seed = (step * PROMPTS + group) * GROUP + index
        sample = await engine.sample("policy", prompt, SamplingParams(COMPLETION, stop_ids=(1,), seed=seed))
        return Scored(one_turn(f"{step}/{group}/{index}", prompt, sample), reward(sample.tokens))

    jobs = [member(g, prompt, i) for g, prompt in enumerate(prompts()) for i in range(GROUP)]
    scored = await asyncio.gather(*jobs)
    return credit_batch("group_mean_std", [scored[i : i + GROUP] for i in range(0, len(scored), GROUP)]).credits


def one_turn(name: str, prompt: tuple[int, ...], sample: Sample) -> Rollout:
    """A rollout of one call."""
    session = Session("s", "main", "policy", trainable=True)
    asked = Node(0, "s", None, {"role": "user", "content": ""}, prompt, len(prompt))
    said = {"role": "assistant", "content": ""}
    answered = Node(1, "s", 0, said, sample.tokens, 0, sample.logprobs, sample.versions)
    call = Call("c", "s", 0, 0, 1, sample.stop, prompt_tokens=len(prompt), completion_tokens=len(sample.tokens))
    return Rollout(name, None, "g", 0, Terminal.COMPLETED, "", [session], [asked, answered], [call])


async def inspan_single_turn(steps: int) -> Rate:
    """The embedded engine and the learner, the first update left out."""
    model = prepare(tiny_llama())
    engine = TorchEngine({"policy": model}, slots=PROMPTS * GROUP)
    objective = make_objective("grpo", {"eps": 0.2}, aggregation="rollout")
    learner = Learner(model, objective, LearnerSettings(optim=OptimSettings(lr=1e-3, betas=(0.9, 0.999))))
    marks = [mark(0)]
    for step in range(steps + 1):
        trained = learner.update(await sample_groups(engine, step), 0.0)["trained_tokens"]
        await engine.load("policy", learner.weights())
        marks.append(mark(marks[-1][2] + trained))
    await engine.close()
    return rate_of(marks[1:])


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="updates a round, beside a first that is not counted")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for row in losses():
        print(json.dumps(row), flush=True)
    from vs_trl_tools import multi_turn

    rows = compare(
        f"single-turn updates, {PROMPTS * GROUP} completions, {{ours}} and {{theirs}} trained tokens, "
        f"{options.threads} thread(s)",
        lambda: asyncio.run(inspan_single_turn(options.steps)),
        lambda: trl_rate(options.steps, single_turn_trainer),
        options.rounds,
    )
    for row in [*rows, *multi_turn(options.steps, options.rounds, options.threads)]:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
