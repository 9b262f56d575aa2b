"""What every actor of Forge keeps to.

`__init__` is cheap and only remembers; `setup` loads what is heavy and replies when the part can work; `close` gives
back what the process would not give back by ending. All endpoints are async and concurrent: a plain Monarch endpoint
blocks every other endpoint of its actor. Work that keeps a core busy runs in a thread, so that the actor still
answers. Replies that depend on weights carry their version.
"""

from __future__ import annotations

import os
import resource

from forge.mesh import Actor, concurrent_endpoint


class ForgeActor(Actor):
    """Base of the cast."""

    @concurrent_endpoint
    async def setup(self) -> None:
        """Load what is heavy. Parts without weights have nothing to do."""

    @concurrent_endpoint
    async def close(self) -> None:
        """Give back what outlives the process."""

    @concurrent_endpoint
    async def memory(self) -> float:
        """Peak resident memory of this process in GiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    @concurrent_endpoint
    async def pid(self) -> int:
        """Process id."""
        return os.getpid()
