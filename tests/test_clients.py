"""The clients of `rankbuffer-serve`, against a real server, with stand-ins for the classes of four frameworks."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import AsyncMock

import pytest
import torch
from aiohttp import web
from conftest import ROOT, by_number, numbers, scripted_judge, unreachable
from datasets import Dataset
from helpers.servers import served
from pydantic import BaseModel

from rankbuffer_tools.service.groups import SingleGroups
from rankbuffer_tools.service.server import GroupServer
from rankbuffer_trl.data.queries import QueryTable
from rankbuffer_trl.rewards.format import AnswerReader
from rankbuffer_trl.rewards.rankbuffer import RankBuffer

pytestmark = pytest.mark.usefixtures("cache")

TEXTS = {"a": ["5", "50", "", "15"], "b": ["7", "3", "2", "60"]}
WANTED = {"a": [-1 / 3, 1.0, -1.0, 1 / 3], "b": [1 / 3, -1 / 3, -1.0, 1.0]}
LOST = "33"  # nobody can judge this text


def answer(messages: list[dict]) -> str | Exception:
    return unreachable(messages) if LOST in messages[0]["content"] else by_number(messages)


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A server with two queries: gives a function that imports a client, and the server's `SingleGroups`."""
    rows = [
        {
            "query_id": id,
            "prompt": id,
            "rubrics": [{"text": "Is high.", "weight": 1}],
            "responses": list(numbers().responses),
        }
        for id in "ab"
    ]
    groups = SingleGroups(RankBuffer(), scripted_judge(answer), tmp_path / "live.sqlite")
    server = GroupServer(groups, AnswerReader(), QueryTable(Dataset.from_list(rows), 4), "t0ken")
    monkeypatch.syspath_prepend(ROOT / "examples" / "clients")
    monkeypatch.setenv("RANKBUFFER_TOKEN", "t0ken")
    with served(server.app()) as url:
        monkeypatch.setenv("RANKBUFFER_URL", f"{url}/")
        monkeypatch.setenv("RANKBUFFER_GATHER", "")

        def load(name: str, **modules: dict) -> ModuleType:
            for path, content in modules.items():
                parts = path.split("__")
                for i in range(len(parts)):
                    monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(parts[i]))
                vars(sys.modules[".".join(parts)]).update(content)
            for each in ("rank_rewards", name):
                monkeypatch.delitem(sys.modules, each, raising=False)
            return importlib.import_module(name)

        yield SimpleNamespace(load=load, groups=groups)
    asyncio.run(groups.close())


def in_turn(one_by_one) -> dict[str, list[float]]:
    """Score the texts of both queries at once, rollout by rollout in turn, and return the rewards by query."""

    async def score():
        calls = [(id, one_by_one(id, place)) for place in range(4) for id in "ab"]
        return [id for id, _ in calls], await asyncio.gather(*(call for _, call in calls))

    ids, rewards = asyncio.run(score())
    return {id: [reward for name, reward in zip(ids, rewards, strict=True) if name == id] for id in "ab"}


def visits(groups: SingleGroups) -> list[tuple]:
    return sorted(groups.store.rows("SELECT query_id, step, epoch FROM groups"))


def test_verl_gathers_the_rollouts_of_a_uid(client):
    class RewardManagerBase:  # as in verl, without its event loop and its class state
        def __init__(self, config, tokenizer, compute_score):
            self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score

    class Data(list):  # `DataProto`: a slice is one, too
        def __getitem__(self, key):
            return Data(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    base = {"RewardManagerBase": RewardManagerBase}
    verl = client.load("verl_rewards", verl__experimental__reward_loop__reward_manager__base=base)
    rollout = SimpleNamespace(n=4, val_kwargs=SimpleNamespace(n=2))
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids.tolist())))
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    manager = verl.RankBufferManager(config, tokenizer, None, reward_router_address=None)

    def item(id: str, place: int, **extra) -> Data:
        ids = [ord(letter) for letter in TEXTS[id][place]]
        batch = {
            "responses": torch.tensor([*ids, 0, 0, 0]),
            "attention_mask": torch.tensor([1, 1, *[1] * len(ids), 0, 0, 0]),
        }
        uid = f"{id}-{place // 2}" if extra else id  # verl draws one for each group
        row = {"uid": uid, "extra_info": {"query_id": id} | extra}
        return Data(["an earlier sequence", SimpleNamespace(batch=batch, non_tensor_batch=row)])

    def score(id: str, place: int, **extra):
        return manager.run_single(item(id, place, **extra))

    in_pairs = {"a": [-1, 1, -1, 1], "b": [1, -1, -1, 1]}
    for extra, wanted, recorded in (({"split": "test"}, in_pairs, 0), ({}, WANTED, 2)):
        found = in_turn(lambda id, place, extra=extra: score(id, place, **extra))
        for id, answers in found.items():
            assert [one["reward_score"] for one in answers] == pytest.approx(wanted[id])
        assert len(visits(client.groups)) == recorded


def test_slime_scores_a_group_and_leaves_out_what_was_not_judged(client):
    slime = client.load("slime_rewards")

    def samples(id: str, texts: list[str], index: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(response=text, metadata={"query_id": id}, group_index=index, remove_sample=False)
            for text in texts
        ]

    made = samples("a", TEXTS["a"], 7)
    assert asyncio.run(slime.rank_group(None, made)) == pytest.approx(WANTED["a"])
    assert not any(sample.remove_sample for sample in made)
    client.groups.limits = (1.0, None)
    made = samples("b", ["7", LOST, "60"], 8)
    assert asyncio.run(slime.rank_group(None, made)) == [-1, 0, 1]
    assert [sample.remove_sample for sample in made] == [False, True, False]
    assert visits(client.groups) == [("a", 7, 0), ("b", 8, 0)]


def test_nemo_gym_gathers_the_rollouts_of_a_task(client):
    class Request(BaseModel):
        response: object

    class Response(Request):
        reward: float

    base = {
        "BaseResourcesServerConfig": BaseModel,
        "BaseVerifyRequest": Request,
        "BaseVerifyResponse": Response,
        "SimpleResourcesServer": BaseModel,
    }
    gym = client.load("nemo_gym_rewards", nemo_gym__base_resources_server=base)
    server = gym.RankBufferServer(config=gym.RankBufferConfig(num_rollouts_per_prompt=4))

    def verify(id: str, place: int):
        response = SimpleNamespace(output_text=TEXTS[id][place])
        names = {"query_id": id, "_ng_group_id": f"visit-{id}", "_ng_rollout_index": place, "_ng_group_attempt": 1}
        return server.verify(gym.RankBufferRequest(response=response, **names))

    found = in_turn(verify)
    assert {id: [one.reward for one in answers] for id, answers in found.items()} == {
        id: pytest.approx(rewards) for id, rewards in WANTED.items()
    }
    assert len(visits(client.groups)) == 2


def test_verifiers_scores_a_group(client):
    verifiers = client.load("verifiers_rewards")
    completions = ["5", [{"content": "a call"}, {"content": "50"}], [{"content": None}], [{"content": "15"}]]
    rewards = asyncio.run(verifiers.rank_group(completions=completions, infos=[{"query_id": "a"}] * 4))
    assert rewards == pytest.approx(WANTED["a"])


def test_rank_rewards_waits_for_a_server_and_not_for_a_refusal(client, monkeypatch):
    rank_rewards, asked = client.load("rank_rewards"), []
    monkeypatch.setattr(rank_rewards, "WAITS", (0, 0, 0, 0))
    with pytest.raises(RuntimeError, match="no query 'nobody'"):
        asyncio.run(rank_rewards.rank_rewards(["5"], query_id="nobody"))

    others = iter(({"error": "ill"}, None, {"detail": "of a proxy"}, ["ill"], {"rewards": [0.5]}))

    async def ill(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) == 2:
            request.transport.close()
        return web.json_response(next(others), status=503 if len(asked) < 5 else 200)

    app = web.Application()
    app.add_routes([web.post("/v1/groups", ill)])
    with served(app) as url:
        monkeypatch.setattr(rank_rewards, "URL", url)
        assert asyncio.run(rank_rewards.rank_rewards(["5"], query_id="a")) == [0.5]
    assert asked == [{"texts": ["5"], "query_id": "a"}] * 5
    with pytest.raises(RuntimeError, match=f"no rewards from {url}: ClientConnectorError"):
        asyncio.run(rank_rewards.rank_rewards(["5"], query_id="a"))
    assert rank_rewards.filled([None, None]) == [0, 0]


def test_gathering_gives_each_rollout_its_own_end(client, monkeypatch):
    rank_rewards = client.load("rank_rewards")

    async def outcomes(ended, number: int = 3, cancelled: int | None = None) -> list:
        """Gather groups of three, whose request ends with `ended`; cancel a rollout while the request is open."""
        asked, gate = asyncio.Event(), asyncio.Event()

        async def request(texts: list[str], **group) -> list[float]:
            assert texts == ["0", "1", "2"] and group == {"query_id": "a"}
            asked.set()
            await gate.wait()
            if isinstance(ended, BaseException):
                raise ended
            return ended

        monkeypatch.setattr(rank_rewards, "rank_rewards", request)
        gathering = rank_rewards.Gathering()
        rollouts = [asyncio.create_task(gathering.reward("key", 3, str(i), query_id="a")) for i in range(number)]
        if number == 3:
            await asyncio.wait_for(asked.wait(), 30)
        if cancelled is not None:
            rollouts[cancelled].cancel()
            await asyncio.wait(rollouts[cancelled : cancelled + 1])
        gate.set()
        await asyncio.wait(rollouts, timeout=30)
        assert not gathering.groups
        return ["cancelled" if one.cancelled() else str(one.exception() or one.result()) for one in rollouts]

    for i in range(3):
        wanted = ["0.0", "0.1", "0.2"]
        wanted[i] = "cancelled"
        assert asyncio.run(outcomes([0.0, 0.1, 0.2], cancelled=i)) == wanted
    assert asyncio.run(outcomes(RuntimeError("no rewards"))) == ["no rewards"] * 3
    assert asyncio.run(outcomes(asyncio.CancelledError())) == ["cancelled"] * 3
    monkeypatch.setattr(rank_rewards, "GATHER", 0)
    assert asyncio.run(outcomes([], number=1)) == ["only 1 of the 3 rollouts of key came within RANKBUFFER_GATHER=0 s"]
    assert asyncio.run(outcomes([0.0, 0.1, 0.2])) == ["0.0", "0.1", "0.2"], "a whole group has no limit"


def test_gathering_judges_the_rollouts_that_came_and_refuses_late_ones(client, monkeypatch):
    rank_rewards, late = client.load("rank_rewards"), "the rollout came too late: attempt {} of the group a is closed"
    monkeypatch.setattr(rank_rewards, "rank_rewards", AsyncMock(side_effect=lambda texts, **_: [*map(float, texts)]))
    gathering = rank_rewards.Gathering()

    def rewards(key: str, line: str) -> asyncio.Future:
        """Let rollouts, each its number, attempt and text, come at once to a group of four."""
        rollouts = [[*map(int, rollout)] for rollout in line.split()]
        calls = (gathering.reward(key, 4, str(text), n, attempt) for n, attempt, text in rollouts)
        return asyncio.gather(*calls, return_exceptions=True)

    async def play() -> None:
        old = rewards("a", "001 102 203")
        await asyncio.sleep(0)
        monkeypatch.setattr(rank_rewards, "GATHER", 0.01)
        *came, older = await rewards("a", "314 215 215 101")
        assert came == [4, 5, 5] and str(older) == late.format(0)
        assert [*map(str, await old)] == ["a later attempt of the group a began"] * 3
        assert [*map(str, await rewards("a", "012 302"))] == [late.format(1), late.format(0)]
        alone, mixed = await rewards("b", "001 002")
        assert str(alone).startswith("only 1 of the 4 rollouts of b came") and "two texts came" in str(mixed)
        monkeypatch.setattr(rank_rewards, "KNOWN", 1)
        assert await rewards("c", "007 108") == [7, 8] and [*gathering.attempts] == ["b", "c"]

    asyncio.run(play())
    assert not gathering.groups
