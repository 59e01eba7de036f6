"""A judge behind a server that takes {"prompt": ..., "seed": ...} and returns {"text": ...}."""

import asyncio
import time
from dataclasses import dataclass

import httpx

from rankbuffer_trl.judge import Reply, TransportError, Usage


@dataclass
class TextServer:
    """A chat client for one such server."""

    url: str
    concurrency: int = 16
    name = "text server"

    def __post_init__(self):
        self._http = httpx.AsyncClient(timeout=120)
        self._slots = asyncio.Semaphore(self.concurrency)

    async def complete(self, messages, *, question, seed, tally) -> Reply:
        async with self._slots:
            prompt = "\n\n".join(message["content"] for message in messages)  # written here, when it is first read
            started = time.perf_counter()
            tally.server, tally.attempts = self.url, tally.attempts + 1
            try:
                response = await self._http.post(self.url, json={"prompt": prompt, "seed": seed})
                response.raise_for_status()
                return Reply(response.json()["text"], Usage())
            except httpx.HTTPError as error:
                raise TransportError(f"{self.url}: {error!r}") from error
            finally:
                tally.seconds += time.perf_counter() - started

    async def close(self) -> None:
        await self._http.aclose()
