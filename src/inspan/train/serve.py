"""A gateway that stands by itself, for programs that are started elsewhere. Contract: killed at any point it loses no
call whose last byte was sent, and goes on with the same keys when it is started again in the same folder.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from inspan.config import Recipe
from inspan.engine.base import SamplingParams
from inspan.errors import InputError
from inspan.gateway.admin import Admin
from inspan.gateway.grants import Terms
from inspan.gateway.pace import Pace
from inspan.gateway.transport import is_loopback, serve
from inspan.stopping import run_until_stopped
from inspan.trace.store import TraceStore
from inspan.train.environment import Environment
from inspan.train.evaluate import load_final, watch_over
from inspan.train.setup import Stack, build_stack, roles_at

KEY_FILE, KEY_VARIABLE, LEAST_KEY = "admin.key", "INSPAN_ADMIN_KEY", 16


def serve_gateway(
    recipe: Recipe,
    *,
    out: Path,
    run: Path | None,
    host: str,
    port: int,
    tell: Callable[[str], None],
    allow_drift: bool = False,
) -> None:
    """Serve until a signal comes, which raises KeyboardInterrupt; `tell` gets a line for the user.

    Requests that show the weights of a run something that its training did not are refused, unless `allow_drift`.
    """
    key = admin_key(out, host)
    run_until_stopped(_serve(recipe, out, run, host, port, key, tell, allow_drift))


async def _serve(
    recipe: Recipe,
    out: Path,
    run: Path | None,
    host: str,
    port: int,
    key: str,
    tell: Callable[[str], None],
    allow_drift: bool,
) -> None:
    store = TraceStore(out / "trace.sqlite")
    stack = build_stack(recipe, Environment([], {}), store, durable=True)
    try:
        if run is not None:
            await load_final(stack, run)
            stack.gateway.watch = watch_over(run, stack.served(), allow_drift=allow_drift)
        for role in roles_at(recipe.agents, 1.0):
            await stack.ensure(role.policy)
        admin = Admin(stack.gateway, store, key, _defaults(stack))
        async with serve(admin, host, port, open_to_others=not is_loopback(host)) as url:
            tell(f"gateway: {url} (admin key: {KEY_VARIABLE} or {out / KEY_FILE})")
            await asyncio.Event().wait()
    finally:
        await stack.close()


def _defaults(stack: Stack) -> Terms:
    recipe = stack.recipe
    roles, sampling = roles_at(recipe.agents, 1.0), recipe.sampling
    given = SamplingParams(sampling.max_tokens, sampling.temperature, sampling.top_p)
    return Terms(roles, stack.limits(), recipe.seed, given, roles[0].name, Pace())


def admin_key(out: Path, host: str) -> str:
    """The admin key: from the environment, else the folder's own, made at the first start and readable by its owner
    alone. Raises `InputError` when others can reach the host and no key was chosen for it, or the key is too short."""
    given = os.environ.get(KEY_VARIABLE, "")
    if given:
        if len(given) < LEAST_KEY:
            raise InputError(f"the admin key has {len(given)} characters", where=KEY_VARIABLE,
                             hint=f"give at least {LEAST_KEY}")  # fmt: skip
        return given
    if not is_loopback(host):
        raise InputError(f"{host} can be reached from other machines", where="--host",
                         hint=f"set {KEY_VARIABLE}, or bind 127.0.0.1")  # fmt: skip
    path = out / KEY_FILE
    out.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(24) + "\n")
    return path.read_text(encoding="ascii").strip()
