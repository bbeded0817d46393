"""Reference objectives in plain Python, written from the formulas: one token at a time, gradients derived by hand.

Each returns (loss, slope) of one token: the loss is minimised, the slope is its derivative by the new log-prob.
"""

from __future__ import annotations

import math


def ppo_token(ratio, advantage, low, high):
    """Value of −min(ρA, clip(ρ)A) and d/dρ."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -advantage
    return -clipped * advantage, 0.0


def grpo(t, p):
    ratio = math.exp(t["new"] - t["behaviour"])
    value, slope = ppo_token(ratio, t["advantage"], p["eps"], p.get("eps_high", p["eps"]))
    return value, slope * ratio


dr_grpo = grpo


def kimi(t, p):
    log_ratio = t["new"] - t["behaviour"]
    ratio = math.exp(log_ratio)
    inside = p["alpha"] <= ratio <= p["beta"]
    value = -(ratio if inside else (p["alpha"] if ratio < p["alpha"] else p["beta"])) * t["advantage"]
    slope = -ratio * t["advantage"] if inside else 0.0
    return value + p["tau"] * log_ratio**2, slope + 2 * p["tau"] * log_ratio


def cispo(t, p):
    ratio = math.exp(t["new"] - t["behaviour"])
    weight = p["low"] if ratio < p["low"] else p["high"] if ratio > p["high"] else ratio
    return -weight * t["advantage"] * t["new"], -weight * t["advantage"]


def tis(t, p):
    weight = min(math.exp(t["old"] - t["behaviour"]), p["cap"])
    ratio = math.exp(t["new"] - t["old"])
    value, slope = ppo_token(ratio, t["advantage"], p["eps"], p["eps"])
    return weight * value, weight * slope * ratio


def icepop(t, p):
    weight = math.exp(t["old"] - t["behaviour"])
    if weight < p["alpha"] or weight > p["beta"]:
        return 0.0, 0.0
    ratio = math.exp(t["new"] - t["old"])
    value, slope = ppo_token(ratio, t["advantage"], p["eps"], p["eps"])
    return weight * value, weight * slope * ratio


TOKEN_WISE = {"grpo": grpo, "dr_grpo": dr_grpo, "kimi": kimi, "cispo": cispo, "tis": tis, "icepop": icepop}


def normaliser(tokens, t, aggregation, length):
    """1/normaliser of token t, counted by hand."""
    groups = {u["group"] for u in tokens}
    rollouts = {u["rollout"] for u in tokens}
    if aggregation == "group_tokens":
        return 1 / len(groups) / sum(u["group"] == t["group"] for u in tokens)
    if aggregation == "token":
        return 1 / len(tokens)
    if aggregation == "rollout":
        return 1 / len(rollouts) / sum(u["rollout"] == t["rollout"] for u in tokens)
    return 1 / len(rollouts) / length


def loss_and_gradient(name, tokens, params, aggregation, length, kl=("k1", 0.0)):
    """The whole loss and its gradient by log-prob, for every objective but gspo."""
    total, gradient = 0.0, []
    for t in tokens:
        scale = normaliser(tokens, t, aggregation, length) * t["weight"]
        estimator, coef = kl
        seen = dict(t)
        extra, extra_slope = 0.0, 0.0
        if coef:
            difference = t["new"] - t["reference"]
            if estimator == "k1":
                seen["advantage"] = t["advantage"] - coef * difference
            elif estimator == "k2":
                extra, extra_slope = coef * difference**2 / 2, coef * difference
            else:
                r = math.exp(-difference)
                extra, extra_slope = coef * (r - 1 + difference), coef * (1 - r)
        value, slope = TOKEN_WISE[name](seen, params)
        total += scale * (value + extra)
        gradient.append(scale * (slope + extra_slope))
    return total, gradient


def gspo_loss_and_gradient(tokens, params, aggregation, length):
    """GSPO with one advantage and weight a rollout: s = (Π ρ)^(1/|o|), differentiated through the geometric mean."""
    total, gradient = 0.0, [0.0] * len(tokens)
    for rollout in sorted({t["rollout"] for t in tokens}):
        members = [i for i, t in enumerate(tokens) if t["rollout"] == rollout]
        product = 1.0
        for i in members:
            product *= math.exp(tokens[i]["new"] - tokens[i]["behaviour"])
        s = product ** (1 / len(members))
        value, slope = ppo_token(s, tokens[members[0]]["advantage"], params["eps"], params["eps_high"])
        scale = sum(normaliser(tokens, tokens[i], aggregation, length) * tokens[i]["weight"] for i in members)
        total += scale * value
        for i in members:
            gradient[i] = scale * slope * s / len(members)
    return total, gradient
