"""A durable gateway in a process of its own, to be killed: `durable_server.py STORE PORT`. What it answers hangs on the
prompt alone, and each token takes a moment."""

from __future__ import annotations

import asyncio
import sys
from hashlib import blake2b

from gateway_fakes import call, ids, tokenizer

from inspan.engine.base import Sample
from inspan.engine.scripted import ScriptedEngine
from inspan.gateway.admin import Admin
from inspan.gateway.gateway import Gateway
from inspan.gateway.render import ChatML
from inspan.gateway.transport import serve
from inspan.trace.store import TraceStore

ADMIN = "an admin key of the test's"


def says(policy, prompt):
    number = int.from_bytes(blake2b(repr(prompt).encode(), digest_size=4).digest(), "big")
    said = f"look {number % 97} see {number % 89}"
    return ids(said + ("\n" + call(query=str(number)) if number % 3 == 0 else ""))


class Slow(ScriptedEngine):
    """Its tokens come one by one."""

    async def sample(self, policy, prompt, params, watch=None) -> Sample:
        made = await super().sample(policy, prompt, params)
        for token in made.tokens:
            await asyncio.sleep(0.001)
            if watch is not None:
                watch([token])
        return made


def gateway(store: TraceStore) -> Gateway:
    return Gateway(Slow(says, context_length=1 << 16), ChatML(tokenizer(), compact=True), store=store, durable=True)


async def main(path: str, port: int) -> None:
    store = TraceStore(path)
    async with serve(Admin(gateway(store), store, ADMIN), port=port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
