"""Ask `rankbuffer-serve` for the rewards of a group. The other files of this folder import this one.

Put this folder on `PYTHONPATH`. `RANKBUFFER_URL` and `RANKBUFFER_TOKEN` say where the server is and what it needs.
`RANKBUFFER_GATHER` is the number of seconds that the rollouts of a group wait for the last one.
"""

import asyncio
import os
from contextlib import suppress
from statistics import fmean

import aiohttp

URL = (os.environ.get("RANKBUFFER_URL") or "http://127.0.0.1:8003").rstrip("/")
TOKEN = os.environ.get("RANKBUFFER_TOKEN", "")
WAITS = (1, 5, 30, 60, 120)  # seconds until a group is posted again; the server judges it once
GATHER = float(os.environ.get("RANKBUFFER_GATHER") or "1800")  # seconds until a group is judged as it is
KNOWN = 100_000  # keys of groups that are remembered, to refuse what comes late


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
    """Gather texts that arrive one by one to whole groups, and give each its reward.

    After `GATHER` seconds a group is judged without the rollouts that are missing, if two are there. A rollout that
    comes later is refused. So a key names one visit of a query, and no other visit may have it.
    """

    def __init__(self):
        self.groups = {}  # the open ones, by key
        self.attempts = {}  # the last attempt of each key

    async def reward(self, key, size: int, text: str, member: int | None = None, attempt: int = 0, **group) -> float:
        """Return the reward of a text. `member` is its number in the group; a later `attempt` replaces the group."""
        last = self.attempts.get(key, -1)
        if attempt < last or (attempt == last and key not in self.groups):
            raise RuntimeError(f"the rollout came too late: attempt {attempt} of the group {key} is closed")
        if attempt > last:
            if key in self.groups:
                self.groups.pop(key)[1].set()  # its rollouts fail
            self.attempts[key] = attempt
            if len(self.attempts) > KNOWN:
                del self.attempts[next(iter(self.attempts))]
            texts, whole = {}, asyncio.Event()
            rewards = asyncio.create_task(self._rewards(key, size, texts, whole, group))
            self.groups[key] = texts, whole, rewards
        texts, whole, rewards = self.groups[key]
        member = len(texts) if member is None else member
        if texts.setdefault(member, text) != text:
            raise RuntimeError(f"two texts came as rollout {member} of the group {key}: give each visit its own key")
        if len(texts) == size:
            del self.groups[key]
            whole.set()
        return (await asyncio.shield(rewards))[member]  # a rollout that is cancelled leaves the others theirs

    async def _rewards(self, key: object, size: int, texts: dict[int, str], whole: asyncio.Event, group: dict):
        with suppress(TimeoutError):
            await asyncio.wait_for(whole.wait(), GATHER)
        if len(texts) < size:
            if whole.is_set():
                raise RuntimeError(f"a later attempt of the group {key} began")
            del self.groups[key]
            if len(texts) < 2:
                raise RuntimeError(
                    f"only 1 of the {size} rollouts of {key} came within RANKBUFFER_GATHER={GATHER:g} s"
                )
        rewards = await rank_rewards(list(texts.values()), **group)
        return dict(zip(texts, filled(rewards), strict=True))
