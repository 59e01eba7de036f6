"""Ask `rankbuffer-serve` for the rewards of a group. The other files of this folder import this one.

Put this folder on `PYTHONPATH`. `RANKBUFFER_URL` and `RANKBUFFER_TOKEN` say where the server is and what it needs.
"""

import asyncio
import os
from statistics import fmean

import aiohttp

URL = os.environ.get("RANKBUFFER_URL", "http://127.0.0.1:8002")
TOKEN = os.environ.get("RANKBUFFER_TOKEN", "")
WAITS = (1, 5, 30, 60, 120)  # seconds until a group is posted again; the server judges it once


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
                body = await answer.json()
        except aiohttp.ClientError as error:  # the server is away, or was killed
            fault = f"{type(error).__name__}: {error}"
            continue
        if answer.status == 200:
            return body["rewards"]
        fault = body["error"]
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
        texts, rewards = self.groups.setdefault(key, ([], asyncio.get_running_loop().create_future()))
        texts.append(text)
        place = len(texts) - 1
        if len(texts) == size:
            del self.groups[key]
            try:
                rewards.set_result(filled(await rank_rewards(texts, **group)))
            except Exception as error:
                rewards.set_exception(error)
        return (await rewards)[place]
