"""The servers of one judge: a query stays with one of them, so that its prompts find their prefix in the cache."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from .endpoint import Endpoint
from .errors import TransportError
from .judge import Asked
from .ledger import Reply, Tally
from .openai_client import OpenAIClient

logger = logging.getLogger(__name__)

HOLDS = 3  # times that one question waits for a server; a question that crashes its server must fail in the end
LOOK_SECONDS = 1.0  # between two checks whether a server is up, while a question waits


class Servers:
    """Route each question to its query's server by rendezvous hashing, and around servers that are down.

    Every query has its own order of servers. A question goes to the first one that is up: when a server fails,
    its queries alone move, spread over the others; when it is back, they alone return. A server that gives no
    connection, no answer in time or 502 to 504 is taken for down until it generates a token again.

    When all servers are down, questions wait until one of them is back, for at most `wait` seconds after the last one
    went down. Questions do not wait if this time has passed, or if no server has ever answered. Such a question goes
    to its first server with all retries of that client, and a fault is then final. A single server has the same rule.

    Args:
        clients (`Sequence[OpenAIClient]`):
            One per server. Each limits what is in flight at its server.
        probe_every (`float`, *optional*, defaults to `5.0`):
            Seconds between two probes of a server that is down.
        wait (`float`, *optional*, defaults to `0.0`):
            Seconds for which questions wait when all servers are down.
    """

    def __init__(self, clients: Sequence[OpenAIClient], probe_every: float = 5.0, wait: float = 0.0):
        self.clients = list(clients)
        self.name = ", ".join(client.name for client in clients)
        self.probe_every = probe_every
        self.wait = wait
        self._answered = False
        self._gave_up = False  # whether the log has said that the wait of this outage is over
        self._outage = 0.0  # when all servers were found down
        self._down: dict[OpenAIClient, float] = {}  # when each server was last found down
        self._probes: dict[OpenAIClient, asyncio.Task] = {}

    @classmethod
    def of(cls, endpoint: Endpoint, decoding: str = "none", free_tokens: int = 256) -> "Servers":
        """Connect to the servers of an endpoint. See [`OpenAIClient`] for `decoding` and `free_tokens`."""
        clients = [
            OpenAIClient(
                url,
                str(endpoint.model),
                endpoint.api_key_env,
                decoding,
                free_tokens,
                endpoint.request,
                endpoint.timeout,
                endpoint.max_retries,
                endpoint.concurrency,
                endpoint.role,
            )
            for url in endpoint.urls
        ]
        return cls(clients, wait=endpoint.wait)

    async def complete(self, messages: list[dict[str, str]], *, question: Asked, seed: int, tally: Tally) -> Reply:
        """Answer as [`ChatClient`] says."""
        order = self.order(question.query_id)
        asked: dict[str, Any] = {"question": question, "seed": seed, "tally": tally}
        for hold in range(HOLDS + 1):
            if len(order) > 1:  # a single server has nowhere to move its queries, so it gets its retries below
                for client in filter(self._is_up, order):
                    try:
                        reply = await ask_once(client, messages, **asked)
                        self._answered = True
                        return reply
                    except TransportError as fault:
                        if fault.kind != "down":
                            raise
                        self._set_down(client, str(fault))
            if hold == HOLDS or not self._holding():
                # With all retries after each hold, a question that is too slow for its time limit would take four
                # times as long to fail.
                ask = partial(ask_once, order[0]) if hold else order[0].complete
                try:
                    reply = await ask(messages, **asked)
                    self._answered = True
                    self._set_up(order[0])
                    return reply
                except TransportError as fault:
                    if fault.kind != "down":
                        raise
                    self._set_down(order[0], str(fault))
                    if hold == HOLDS or not self._holding():
                        raise
            await self._wait_for_a_server()
        raise AssertionError("the last round returns or raises")

    def order(self, query_id: str) -> list[OpenAIClient]:
        """Return the servers as this query prefers them. The order does not depend on how they are listed."""
        return sorted(self.clients, key=lambda client: hashlib.sha256(f"{client.url} {query_id}".encode()).digest())

    def _all_down(self) -> bool:
        return len(self._down) == len(self.clients)

    def _holding(self) -> bool:
        """Return whether questions wait for a server instead of being sent."""
        return self._all_down() and self._answered and time.monotonic() < self._outage + self.wait

    async def _wait_for_a_server(self) -> None:
        while self._holding():
            for client in self.clients:
                self._is_up(client)  # starts a probe if one is due
            await asyncio.sleep(max(0.01, min(self.probe_every, LOOK_SECONDS)))
        if self._all_down() and not self._gave_up:
            self._gave_up = True
            logger.warning("no %s server was back within %g s, so questions fail now", self.clients[0].role, self.wait)

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
        elif client in self._down:
            self._down[client] = time.monotonic()

    def _set_down(self, client: OpenAIClient, cause: str) -> None:
        known = client in self._down
        self._down[client] = time.monotonic()
        if known:
            return
        if not self._all_down():
            text = f"the {client.role} server %s is down, its queries move to another one: %s"
            logger.warning(text, client.url, cause)
            return
        self._outage, self._gave_up = time.monotonic(), False
        if self._holding():
            text = "the %s server %s is down, questions wait up to %g s for one that answers: %s"
            logger.warning(text, client.role, client.url, self.wait, cause)
        else:
            logger.warning("the %s server %s is down, there is no other one: %s", client.role, client.url, cause)

    def _set_up(self, client: OpenAIClient) -> None:
        if self._down.pop(client, None) is not None:
            logger.warning("the %s server %s is back", client.role, client.url)

    async def close(self) -> None:
        """Close all connection pools."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*(client.close() for client in self.clients))


async def ask_once(client: OpenAIClient, messages: list[dict[str, str]], **kwargs: Any) -> Reply:
    """Send one request, so that a server that is down is noticed at once. Only a busy server gets all retries."""
    try:
        return await client.complete(messages, retry=False, **kwargs)
    except TransportError as fault:
        if fault.kind != "busy":
            raise
    return await client.complete(messages, **kwargs)
