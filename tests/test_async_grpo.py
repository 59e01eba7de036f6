"""The reward for TRL's asynchronous trainer: pickled, several groups at once, and in the trainer's real worker."""

import asyncio
import pickle
import queue
from contextlib import closing
from random import Random

import pytest
from accelerate import PartialState
from aiohttp import web
from conftest import by_number, group, scripted_judge
from conftest import numbers as query_of_numbers
from datasets import Dataset
from helpers.contents import contents
from helpers.servers import served
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.experimental.async_grpo import async_rollout_worker
from trl.trainer import utils

from rankbuffer_tools.service.async_grpo import AsyncRankBufferReward
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.store import BufferStore, history

pytestmark = pytest.mark.usefixtures("cache")
needs_trl_1_16 = pytest.mark.skipif(not hasattr(utils, "is_async_callable"), reason="needs TRL 1.16")


def rows() -> Dataset:
    references, rubrics = list(query_of_numbers().responses), [{"text": "Is high.", "weight": 1}]
    prompts = [[{"role": "user", "content": id}] for id in "ab"]
    return Dataset.from_dict({"prompt": prompts, "rubrics": [rubrics] * 2, "responses": [references] * 2})


def asked(id: str, line: str) -> dict:
    """The arguments of one call, as the worker passes them."""
    completions = [[{"role": "assistant", "content": "" if text == "-" else text}] for text in line.split()]
    prompts = [[{"role": "user", "content": id}]] * len(completions)
    return dict(prompts=prompts, completions=completions, completion_ids=[[1]] * len(completions), level=[3] * 5)


@needs_trl_1_16
def test_a_reward_that_was_pickled_scores_groups_at_once(tmp_path, scorer, monkeypatch):
    monkeypatch.setattr(JudgeConfig, "judge", lambda self: scripted_judge(by_number))
    reward = AsyncRankBufferReward(rows(), JudgeConfig(), tmp_path / "live.sqlite")
    assert utils.is_async_callable(reward) and not (tmp_path / "live.sqlite").exists()
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
    mine, theirs = (contents(store)["groups"] for store in (tmp_path / "live.sqlite", oracle.store))
    # but for the steps, which are also in the ids of anchors: b was scored beside a
    assert sorted((row[0], *row[2:7]) for row in mine) == sorted((row[0], *row[2:7]) for row in theirs)


@needs_trl_1_16
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


def test_a_trl_that_would_not_await_the_reward_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(utils, "is_async_callable", raising=False)
    with pytest.raises(SettingsError, match="AsyncRankBufferReward needs TRL"):
        AsyncRankBufferReward(rows(), JudgeConfig(), tmp_path / "live.sqlite")


@needs_trl_1_16
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
    reward = AsyncRankBufferReward(dataset, JudgeConfig(), tmp_path / "live.sqlite")
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
        PartialState()  # for the worker's log
        samples = []
        try:
            worker.start()
            while len(samples) < 28:  # seven groups of three queries
                try:
                    samples.append(worker.rollout_buffer.get(timeout=5))
                except queue.Empty:
                    worker.check_health(stale_after_s=120)
        finally:
            worker.stop()
    with closing(BufferStore(tmp_path / "live.sqlite")) as store:  # which nobody has now
        groups = history.groups(store)
    assert [row.step for row in groups] == [*range(len(groups))] and len(groups) >= 7
    visits = {id: [row.epoch for row in groups if row.query_id == id] for id in reward.queries.ids}
    assert all(epochs == [*range(len(epochs))] for epochs in visits.values())
    recorded = [sorted(row.rewards) for row in groups]
    for first in range(0, 28, 4):
        together = samples[first : first + 4]
        assert len({sample.group_id for sample in together}) == 1
        assert sorted(sample.metrics["rewards/rank_reward"] for sample in together) in recorded
