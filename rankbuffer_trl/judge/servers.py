"""Several servers of one judge: a query stays with one of them, so that its prompts find their prefix cached there."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from .errors import TransportError
from .judge import Asked
from .ledger import Tally, Usage
from .openai_client import OpenAIClient

logger = logging.getLogger(__name__)


class Servers:
    """Routes each question to its query's server by rendezvous hashing, and around servers that are down.

    Every query has an order of servers of its own. It goes to the first one that is up: when a server fails, its
    queries alone move, spread over the others; when it is back, they alone return. A server that gives no connection,
    no answer in time or 502 to 504 is taken for down until it generates a token again. When all are down, a question
    waits at its own server as long as that client retries.

    Args:
        clients (`Sequence[OpenAIClient]`):
            One per server. Each limits what is in flight at its server.
        probe_every (`float`, *optional*, defaults to `5.0`):
            Seconds between two looks at a server that is down.
    """

    def __init__(self, clients: Sequence[OpenAIClient], probe_every: float = 5.0):
        self.clients = list(clients)
        self.name = ", ".join(client.name for client in clients)
        self.probe_every = probe_every
        self._down: dict[OpenAIClient, float] = {}  # when it was last found so
        self._probes: dict[OpenAIClient, asyncio.Task] = {}

    async def complete(
        self, messages: list[dict[str, str]], *, question: Asked, seed: int, tally: Tally
    ) -> tuple[str, Usage]:
        """See [`ChatClient`]."""
        order = self.order(question.query_id)
        for client in order:
            if not self._is_up(client):
                continue
            try:
                return await ask_once(client, messages, question=question, seed=seed, tally=tally)
            except TransportError as fault:
                if fault.kind != "down":
                    raise
                self._set_down(client, str(fault))
        answer = await order[0].complete(messages, question=question, seed=seed, tally=tally)
        self._set_up(order[0])
        return answer

    def order(self, query_id: str) -> list[OpenAIClient]:
        """The servers in the order in which this query prefers them; it does not depend on how they are listed."""
        return sorted(self.clients, key=lambda client: hashlib.sha256(f"{client.url} {query_id}".encode()).digest())

    def _is_up(self, client: OpenAIClient) -> bool:
        if client not in self._down:
            return True
        probe = self._probes.get(client)
        if (probe is None or probe.done()) and time.monotonic() - self._down[client] >= self.probe_every:
            self._probes[client] = asyncio.create_task(self._probe(client))
        return False

    async def _probe(self, client: OpenAIClient) -> None:
        if await client.alive():
            self._set_up(client)
        else:
            self._down[client] = time.monotonic()

    def _set_down(self, client: OpenAIClient, cause: str) -> None:
        if client not in self._down:
            logger.warning("the judge server %s is down, its queries move to another one: %s", client.url, cause)
        self._down[client] = time.monotonic()

    def _set_up(self, client: OpenAIClient) -> None:
        if self._down.pop(client, None) is not None:
            logger.warning("the judge server %s is back", client.url)

    async def close(self) -> None:
        """Close all connection pools."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*(client.close() for client in self.clients))


async def ask_once(client: OpenAIClient, messages: list[dict[str, str]], **kwargs: Any) -> tuple[str, Usage]:
    """One request, so that a server that is down is noticed at once; only one that is busy gets all retries."""
    try:
        return await client.complete(messages, retry=False, **kwargs)
    except TransportError as fault:
        if fault.kind != "busy":
            raise
    return await client.complete(messages, **kwargs)
