"""Ask `rankbuffer-serve` for the rewards of a group. The other files of this folder import this one.

Put this folder on `PYTHONPATH`. `RANKBUFFER_URL` and `RANKBUFFER_TOKEN` say where the server is and what it needs.
`RANKBUFFER_GATHER` is the number of seconds that the rollouts of a group wait for the last one.
"""

import asyncio
import os
from contextlib import suppress
from statistics import fmean

import aiohttp

URL = os.environ.get("RANKBUFFER_URL", "http://127.0.0.1:8003")
TOKEN = os.environ.get("RANKBUFFER_TOKEN", "")
WAITS = (1, 5, 30, 60, 120)  # seconds until a group is posted again; the server judges it once
GATHER = float(os.environ.get("RANKBUFFER_GATHER", "1800"))  # seconds until a group that is not whole is given up


async def rank_rewards(texts: list[str], **group) -> list[float | None]:
    """Return a reward per text. `group` has the other fields of the request, such as `query_id`."""
    headers = {"Authorization": f"Bearer {TOKEN}"} if TOKEN else {}
    fault = ""
    for wait in (0, *WAITS):
        await asyncio.sleep(wait)
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as http,
                http.post(f"{URL}/v1/groups", json={"texts": texts} | group) as answer,
            ):
                if answer.status == 200:
                    return (await answer.json())["rewards"]
                # as text, because a proxy may have written it
                fault = f"HTTP {answer.status}: {await answer.text(errors='replace')}"
        except aiohttp.ClientError as error:  # the server is away, or was killed
            fault = f"{type(error).__name__}: {error}"
            continue
        if answer.status < 500:
            break
    raise RuntimeError(f"no rewards from {URL}: {fault}")


def filled(rewards: list[float | None]) -> list[float]:
    """Give a text without a reward the mean of the others. Its advantage in the group is then 0."""
    known = [reward for reward in rewards if reward is not None]
    return [reward if reward is not None else fmean(known) if known else 0.0 for reward in rewards]


class Gathering:
    """Gather texts that arrive one by one to whole groups, and give each its reward."""

    def __init__(self):
        self.groups = {}

    async def reward(self, key: object, size: int, text: str, **group) -> float:
        if key not in self.groups:
            texts, whole = [], asyncio.Event()
            rewards = asyncio.create_task(self._rewards(key, size, texts, whole, group))
            self.groups[key] = texts, whole, rewards
        texts, whole, rewards = self.groups[key]
        texts.append(text)
        place = len(texts) - 1
        if len(texts) == size:
            del self.groups[key]
            whole.set()
        return (await asyncio.shield(rewards))[place]  # a rollout that is cancelled leaves the others theirs

    async def _rewards(self, key: object, size: int, texts: list[str], whole: asyncio.Event, group: dict):
        with suppress(TimeoutError):
            await asyncio.wait_for(whole.wait(), GATHER)
        if len(texts) < size:  # the next visit may have the same key, and must not be mixed with this one
            del self.groups[key]
            came = f"only {len(texts)} of the {size} rollouts of {key} came"
            raise RuntimeError(f"{came} within RANKBUFFER_GATHER={GATHER:g} s")
        return filled(await rank_rewards(texts, **group))
