"""The reward for TRL's asynchronous trainer: pickled, several groups at once, and in the trainer's real worker."""

import asyncio
import json
import pickle
import queue
from dataclasses import dataclass
from random import Random

import pytest
from aiohttp import web
from conftest import by_number, group, numbers, scripted_judge
from datasets import Dataset
from helpers.contents import contents
from helpers.http_server import served
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import async_rollout_worker
from trl.trainer.utils import is_async_callable

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.rubric_judge import RubricJudge
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.service.async_grpo import AsyncRankBufferReward
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store.places import read_store

pytestmark = pytest.mark.usefixtures("cache")


@dataclass
class NumberJudge(RubricJudge):
    """A judge for texts that are numbers, named by its path as `judge_client`."""

    name = "number judge"

    def answer(self, messages):
        return by_number(messages), super().answer.__defaults__


def rows(ids: str = "ab") -> Dataset:
    rubrics = [{"text": "Is high.", "weight": 1}]
    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": id}], "rubrics": rubrics, "responses": list(numbers().responses)}
            for id in ids
        ]
    )


def asked(id: str, line: str) -> dict:
    """The arguments of one call, as the worker passes them."""
    completions = [[{"role": "assistant", "content": "" if text == "-" else text}] for text in line.split()]
    prompts = [[{"role": "user", "content": id}]] * len(completions)
    return dict(prompts=prompts, completions=completions, completion_ids=[[1]] * len(completions), level=[3] * 5)


def test_a_reward_that_was_pickled_scores_groups_at_once(tmp_path, scorer, monkeypatch):
    monkeypatch.setattr(JudgeConfig, "judge", lambda self: scripted_judge(by_number))
    reward = AsyncRankBufferReward(rows(), JudgeConfig(), tmp_path / "live.sqlite")
    assert is_async_callable(reward) and not (tmp_path / "live.sqlite").exists()
    lines = [("a", "5 - 50 15"), ("a", "60 3 17 30"), ("b", "1 2 3 4"), ("a", "9 9 9 -")]

    async def score(reward) -> list[list[float | None]]:
        try:
            return await asyncio.gather(*(reward(**asked(id, line)) for id, line in lines))
        finally:
            assert pickle.loads(pickle.dumps(reward))._groups is None, "an open one can be sent, too"
            await reward.close()

    rewards = asyncio.run(score(pickle.loads(pickle.dumps(reward))))
    oracle = scorer(scripted_judge(by_number))
    names = {id: reward.queries.ids["ab".index(id)] for id in "ab"}
    for step, (id, line) in enumerate(lines):
        known = oracle.score([group(reward.queries[names[id]], line, step)], step)
        assert rewards[step] == list(known.scores[0].rewards)
    found, wanted = (sorted(row[2:] for row in contents(store)["groups"]) for store in (tmp_path, oracle.store))
    assert found == wanted


def test_a_reward_refuses_mixed_groups_and_a_store_that_is_there(tmp_path):
    path = tmp_path / "live.sqlite"
    reward = AsyncRankBufferReward(rows(), JudgeConfig(), path)
    a, b = asked("a", "5 6"), asked("b", "5 6")
    mixed = a | {"prompts": a["prompts"][:1] + b["prompts"][:1]}
    with pytest.raises(ValueError, match="should be one group but are of the queries"):
        asyncio.run(reward(**mixed))
    asyncio.run(reward.close())
    BufferStore(path).close()
    with pytest.raises(SettingsError, match="exists: set resume=True to go on with its buffers"):
        AsyncRankBufferReward(rows(), JudgeConfig(), path)
    AsyncRankBufferReward(rows(), JudgeConfig(), path, resume=True)


@pytest.mark.slow  # the worker's process loads TRL anew
def test_the_workers_process_records_each_group_that_it_rewards(tmp_path, tiny_policy, howto, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = qwen3_chat_template
    luck, texts = Random(0), [text for row in howto for text in row["responses"]]

    async def complete(request: web.Request) -> web.Response:
        assert (await request.json())["n"] == 1
        ids = tokenizer(luck.choice(texts))["input_ids"]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", complete)])
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    dataset = Dataset.from_list(howto[:3])
    reward = AsyncRankBufferReward(dataset, JudgeConfig(), tmp_path / "live.sqlite", RankBuffer())
    with served(app) as url:
        worker = async_rollout_worker.AsyncRolloutWorker(
            model_name="policy",
            dataset=dataset.select_columns(["prompt", "query_id"]),
            reward_funcs=[reward],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            num_generations=4,
            max_inflight_tasks=24,
            vllm_server_url=url,
            queue_maxsize=40,
        )
        worker.start()
        try:
            samples = []
            while len(samples) < 28:
                try:
                    samples.append(worker.rollout_buffer.get(timeout=5))
                except queue.Empty:
                    worker.check_health(600)
        finally:
            worker.stop()
    with BufferStore(tmp_path / "live.sqlite").rows("SELECT 1") and read_store(tmp_path / "live.sqlite") as store:
        pass
