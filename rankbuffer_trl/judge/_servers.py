"""The servers of one judge: a query stays with one of them, so that its prompts find their prefix in the cache."""

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ._endpoint import Endpoint
from ._errors import TransportError
from ._judge import Askable
from ._ledger import Reply, Tally
from ._openai_client import PASSING, OpenAIClient

logger = logging.getLogger(__name__)

HOLDS = 3  # times that one question waits for a server; a question that crashes its server must fail in the end
BUSY_SECONDS = 60.0  # for which a server is left alone that takes no more and does not say until when


class Servers:
    """Route each question to its query's server by rendezvous hashing, and around servers that are down.

    Every query has its own order of servers. A question goes to the first one that is up: when a server fails, its
    queries alone move, spread over the others; when it is back, they alone return. A server that gives no connection,
    no answer in time or 502 to 504 is taken for down until it generates a token again.

    A server that answers 429 to two questions in a row, after all retries, is left alone too. Its questions fail once
    none was answered for `wait` seconds.

    When all servers are down, questions wait until one of them is back, for at most `wait` seconds after the last one
    went down. A single server has the same rule.

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
        self._answered_at = -math.inf  # on the monotonic clock
        self._refused: set[int] = set()  # the questions that met a limit since the last answer; one alone is too large
        self._limits, self._at_limit = 0, False  # how often a question met one, and whether all wait for its end
        self._gave_up = False  # whether the log has said that the wait of this outage is over
        self._wait_ends = 0.0  # of this outage, on the monotonic clock
        self._down: dict[OpenAIClient, asyncio.Task] = {}  # each with the task that probes it
        self._back = asyncio.Event()

    @classmethod
    def of(cls, endpoint: Endpoint, decoding: str = "none", free_tokens: int = 256, samples: int = 1) -> "Servers":
        """Connect to the servers of an endpoint. See [`OpenAIClient`] for the other arguments."""
        form = decoding, free_tokens, endpoint, samples
        return cls([OpenAIClient(url, endpoint.model, *form) for url in endpoint.urls], wait=endpoint.wait)

    async def complete(
        self, messages: Sequence[dict[str, str]], *, question: Askable, seed: int, tally: Tally
    ) -> Reply:
        order = self.order(question.query_id)
        request = {"messages": messages, "question": question, "seed": seed, "tally": tally}
        hold = 0
        while True:
            for client in order if len(order) > 1 else ():  # a single server gets its retries below
                if client not in self._down and isinstance(outcome := await self._ask(client, request), Reply):
                    return outcome
            if hold == HOLDS or not self._waiting():
                # Nobody waits, so the first server gets the question, and its fault is final.
                # With all retries after each hold, a question that is too slow for its time limit would take four
                # times as long to fail.
                outcome = await self._ask(order[0], request, retry=not hold)
                if isinstance(outcome, Reply):
                    self._set_up(order[0])
                    return outcome
                stuck = outcome.limited and time.monotonic() > self._answered_at + self.wait
                alone = outcome.limited and len(self._refused) == 1
                if hold == HOLDS or stuck or not (alone or self._waiting()):
                    raise outcome
                if alone:
                    limits_before = self._limits
                    await asyncio.sleep(self._pause(outcome))
                    hold += self._limits == limits_before  # else others have met it by now: it is a limit of all
                    continue
            # A limit of requests a minute can hold a question of a large step often, while others are answered.
            hold += not self._at_limit
            await self._wait_for_a_server()

    def order(self, query_id: str) -> list[OpenAIClient]:
        """Return the servers as this query prefers them."""
        # By hash: however the servers are listed.
        return sorted(self.clients, key=lambda client: hashlib.sha256(f"{client.url} {query_id}".encode()).digest())

    async def _ask(self, client: OpenAIClient, request: dict[str, Any], retry: bool = False) -> Reply | TransportError:
        """Return the reply of a server, or the fault by which it is down. Without `retry`, that is noticed at once."""
        try:
            await client.find_penalties()
            try:
                reply = await client.complete(retry=retry, **request)
            except TransportError as fault:
                if retry or fault.kind != "busy":  # a busy server gets its retries all the same
                    raise
                reply = await client.complete(**request)
        except TransportError as fault:
            if await self._is_gone(client, fault):
                fault.kind, fault.passing = "down", True
            if fault.kind != "down" and not (fault.limited and self.wait):
                raise
            if fault.limited:
                self._refused.add(id(request))  # one question alone may have too many tokens, and the others go on
                self._limits += 1
            if not fault.limited or len(self._refused) > 1:
                self._set_down(client, fault)
            return fault
        self._answered_at = time.monotonic()
        self._refused.clear()
        return reply

    async def _is_gone(self, client: OpenAIClient, fault: TransportError) -> bool:
        """Say whether a server that has answered before is gone, with a gateway that answers for it.

        That answers 404, 500, or a page with status 200 while the server starts again. A token that is asked for shows
        whether such an answer is about the question or the server.
        """
        about_server = fault.status in (None, 404) or fault.status >= 500 or fault.status in PASSING
        return about_server and fault.kind != "down" and self._answered_at > -math.inf and await client.gone()

    def _all_down(self) -> bool:
        return len(self._down) == len(self.clients)

    def _waiting(self) -> bool:
        """Return whether questions wait for a server instead of being sent."""
        # If none has ever answered, an address may be wrong.
        return self._all_down() and self._answered_at > -math.inf and time.monotonic() < self._wait_ends

    async def _wait_for_a_server(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_ends - time.monotonic()):
                await self._back.wait()
        if self._all_down() and not self._gave_up:
            self._gave_up = True
            logger.warning("no %s server was back within %g s, so questions fail now", self.clients[0].role, self.wait)

    def _pause(self, limit: TransportError) -> float:
        """Return the seconds after which a limit of requests is tried again."""
        return min(limit.retry_after or BUSY_SECONDS, self.wait)

    async def _recover(self, client: OpenAIClient, cause: TransportError) -> None:
        """Take a server for up again after the pause of its limit, or when it generates a token."""
        pause = self._pause(cause) if cause.limited else max(0.01, self.probe_every)
        await asyncio.sleep(pause)
        while not (cause.limited or await client.alive()):  # a probe would be one request more of those it limits
            await asyncio.sleep(pause)
        self._set_up(client)

    def _set_down(self, client: OpenAIClient, cause: TransportError) -> None:
        if client in self._down:
            return
        state = "at its limit" if cause.limited else "down"
        self._down[client] = asyncio.create_task(self._recover(client, cause))
        follows = "its queries move to another one"
        if self._all_down():
            self._back.clear()
            self._wait_ends, self._gave_up, self._at_limit = time.monotonic() + self.wait, False, cause.limited
            wait = f"questions wait up to {self.wait:g} s for one that answers"
            follows = wait if self._waiting() else "there is no other one"
        logger.warning("the %s server %s is %s, %s: %s", client.role, client.url, state, follows, cause)

    def _set_up(self, client: OpenAIClient) -> None:
        probe = self._down.pop(client, None)
        if probe is None:
            return
        client.forget_penalties()
        self._back.set()
        if probe is not asyncio.current_task():  # a probe that finds it up ends by itself
            probe.cancel()
        logger.warning("the %s server %s is back", client.role, client.url)

    async def close(self) -> None:
        """End the probes and close all connection pools."""
        for probe in self._down.values():
            probe.cancel()
        await asyncio.gather(*(client.close() for client in self.clients))
