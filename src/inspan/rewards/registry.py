"""Reward terms by name. Contract: `resolve` gives a term, or a RecipeError that says what would have been right."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from inspan.config.objects import load_object
from inspan.config.recipe import nearest
from inspan.errors import RecipeError
from inspan.rewards.base import Term
from inspan.rewards.exact_match import exact_match
from inspan.rewards.invalid_calls import invalid_calls
from inspan.rewards.item_f1 import item_f1
from inspan.rewards.r_finish import r_finish
from inspan.rewards.r_parallel import r_parallel, r_parallel_count
from inspan.rewards.retrieval import retrieval

BUILT_IN: dict[str, Callable[..., Term]] = {
    "item_f1": item_f1,
    "exact_match": exact_match,
    "r_parallel": r_parallel,
    "r_parallel_count": r_parallel_count,
    "r_finish": r_finish,
    "invalid_calls": invalid_calls,
    "retrieval": retrieval,
}
"""The built-in terms: each value makes the term from the recipe's parameters."""


def resolve(name: str, params: Mapping[str, Any] | None = None, *, python_path: Sequence[str] = ()) -> Term:
    """The term that a recipe names: a built-in one, or a user's `module:function`, which gets `params` as keywords.

    A user's module is searched in `python_path` and the working directory. Raises RecipeError for an unknown name
    (naming the nearest), an unknown or faulty parameter, and a function that cannot take a rollout.
    """
    params = dict(params or {})
    if name in BUILT_IN:
        _check_params(name, BUILT_IN[name], params, taken=0)
        try:
            return BUILT_IN[name](**params)
        except TypeError as error:
            raise RecipeError(f"a parameter has the wrong type: {error}", where=name, hint="give numbers") from error
    if ":" not in name:
        close = nearest(name, BUILT_IN)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(BUILT_IN)}, or module:function"
        raise RecipeError(f"unknown reward term {name!r}", hint=hint)
    function = load_object(name, python_path, what="reward")
    if not callable(function):
        raise RecipeError(f"{name!r} is a {type(function).__name__}, not a function", hint="def my_term(rollout): ...")
    _check_params(name, function, params, taken=1)
    if not params:
        return cast("Term", function)
    term = functools.partial(function, **params)
    functools.update_wrapper(term, function)  # keeps the marks that a term carries
    return cast("Term", term)


def _check_params(name: str, function: Callable[..., Any], params: Mapping[str, Any], *, taken: int) -> None:
    """Whether `function` can be called with `taken` positional arguments and `params`."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # written in C: it will say so itself
    known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD][taken:]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key in params:
        if key not in known and not open_ended:
            close = nearest(key, known)
            hint = f"did you mean {close!r}?" if close else f"it takes {', '.join(known) or 'no parameters'}"
            raise RecipeError(f"unknown parameter {key!r}", where=name, hint=hint)
    try:
        signature.bind(*range(taken), **params)
    except TypeError as error:
        raise RecipeError(
            f"cannot be called as a reward: {error}", where=name, hint="def my_term(rollout): ..."
        ) from None
