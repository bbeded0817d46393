"""A run directory as a training leaves it, made up from a formula: the input of the report's tests."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from inspan.config import dump_toml, from_dict

RECIPE = {
    "name": "swarm",
    "tasks": {"use": "facts"},
    "rewards": [
        {"use": "item_f1"},
        {"use": "r_parallel", "weight": {"from": 0.3, "to": 0.0, "over": 0.6}},
        {"use": "r_finish", "weight": {"from": 0.2, "to": 0.0, "over": 0.6}},
    ],
}


def arm(f1: float, steps: float, width: float, n: int = 96) -> dict:
    return {
        "n": n,
        "item_f1": f1,
        "exact": f1 * 0.6,
        "critical_steps": steps,
        "parallel_width": width,
        "tool_calls": steps * max(1.0, width),
        "spawn_rate": min(1.0, width / 5),
        "invalid_calls": 0.3 / (1 + width),
        "critical_path_s": steps * 0.9,
    }


def metrics(update: int, total: int, rng: random.Random) -> dict:
    t = update / total
    rise = 1 / (1 + math.exp(-8 * (t - 0.4)))
    noise = rng.gauss
    fade = max(0.0, 1 - t / 0.6)
    return {
        "update": update,
        "reward": 0.25 + 0.5 * rise + noise(0, 0.03),
        "item_f1": 0.22 + 0.5 * rise + noise(0, 0.03),
        "terms": {"item_f1": 0.22 + 0.5 * rise, "r_parallel": 0.9 * rise, "r_finish": 0.4 + 0.5 * rise},
        "weights": {"item_f1": 1.0, "r_parallel": 0.3 * fade, "r_finish": 0.2 * fade},
        "parallel_width": 1 + 6 * rise + noise(0, 0.2),
        "critical_steps": 13 - 6 * rise + noise(0, 0.3),
        "spawn_rate": 0.12 + 0.7 * rise,
        "tool_calls": 11 + 9 * rise,
        "invalid_calls": 0.4 * (1 - rise),
        "entropy": 0.9 - 0.4 * t + noise(0, 0.02),
        "ratio_mean": 1 + noise(0, 0.004),
        "clip_share": 0.01 + abs(noise(0, 0.004)),
        "staleness_mean": 0.0,
        "rollout_tokens_per_s": 8400 + noise(0, 300),
        "dropped_groups": rng.choice([0, 0, 1, 2]),
        "none_share": 0.0,
        "grad_norm": 0.4 + abs(noise(0, 0.1)),
        "unheard_of": float(update),
    }


def trajectory(width: int = 4, *, text: str = "the yen", arm_name: str = "trained") -> dict:
    names = [f"Country {chr(65 + i)}" for i in range(width)]
    calls = [{"id": "c", "name": "create_subagent", "arguments": '{"name": "r", "system_prompt": "Look it up."}'}]
    calls += [
        {"id": f"a{i}", "name": "assign_task", "arguments": json.dumps({"agent": "r", "prompt": f"Currency of {n}?"})}
        for i, n in enumerate(names)
    ]
    root = [
        {"role": "system", "content": "You answer questions from a library.", "tools": [{"name": "search"}] * 4},
        {"role": "user", "content": f"Give the currency of {', '.join(names)}."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls),
        {"role": "assistant", "content": "\n".join(f"{n} | {text}" for n in names)},
    ]
    sessions = [
        {"id": "s0", "agent": "orchestrator", "policy": "policy", "parent": None, "parent_call": None, "messages": root}
    ]
    for i, name in enumerate(names):
        messages: list[dict] = [
            {"role": "system", "content": "Look it up."},
            {"role": "user", "content": f"Currency of {name}?"},
        ]
        for turn in range(1 + i % 3):
            call = {"id": f"t{i}-{turn}", "name": "search", "arguments": json.dumps({"query": f"{name} currency"})}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": f"1. {name}: money\nThe currency of {name} is {text}.",
                },
            ]
        messages.append({"role": "assistant", "content": text})
        sessions.append(
            {
                "id": f"s{i + 1}",
                "agent": "subagent",
                "policy": "policy@v0",
                "parent": "s0",
                "parent_call": f"a{i}",
                "messages": messages,
            }
        )
    return {
        "update": 40,
        "arm": arm_name,
        "task": {"prompt": root[1]["content"], "kind": "wide", "answer": [[n, "yen"] for n in names]},
        "reward": 0.75,
        "terms": {"item_f1": 0.75, "r_parallel": 1.0, "r_finish": None},
        "terminal": "completed",
        "answer": root[-1]["content"],
        "sessions": sessions,
        "stages": [],
    }


def write_run(path: Path, updates: int = 40) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    (path / "recipe.toml").write_text(dump_toml(from_dict(RECIPE)))
    lines = [json.dumps(metrics(u, updates, rng)) for u in range(1, updates + 1)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    arms = {"warm_start": arm(0.31, 12.9, 0.4), "single_agent": arm(0.52, 13.8, 0.0), "trained": arm(0.78, 6.2, 5.6)}
    kinds = {
        "wide": {
            "warm_start": arm(0.22, 13.9, 0.5, 48),
            "single_agent": arm(0.41, 14.0, 0.0, 48),
            "trained": arm(0.77, 6.4, 7.9, 48),
        },
        "deep": {
            "warm_start": arm(0.40, 6.1, 0.1, 20),
            "single_agent": arm(0.7, 6.0, 0.0, 20),
            "trained": arm(0.72, 6.0, 1.1, 20),
        },
        "narrow": {
            "warm_start": arm(0.61, 3.1, 0.1, 28),
            "single_agent": arm(0.9, 3.0, 0.0, 28),
            "trained": arm(0.9, 3.0, 0.02, 28),
        },
    }
    summary = {
        "recipe": "swarm",
        "seed": 0,
        "updates": updates,
        "wall_s": 431.0,
        "peak_rss_mb": 1630.0,
        "arms": arms,
        "by_kind": kinds,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    trajectories = [trajectory(0, arm_name="warm_start"), trajectory(3), trajectory(8)]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(t) + "\n" for t in trajectories))
    return path
