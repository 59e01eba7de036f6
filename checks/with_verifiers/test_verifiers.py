"""`GroupRanker` inside the real verifiers: its environment, rollouts, interception and client. `make test-verifiers`.

The policy is a server of this file that answers with the responses of a data set. The judge is the embedded one.
"""

import asyncio
import json
import sys
from itertools import count
from pathlib import Path

import pytest
import verifiers
import verifiers.v1 as vf
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent))  # verifiers imports an environment by its name

from rank_env import DATA

from rankbuffer_trl import GroupRanker, read_store
from rankbuffer_trl.judge import RubricJudge, TransportError
from rankbuffer_trl.store import history

ROWS = [json.loads(line) for line in DATA.read_text().splitlines()[:2]]
N = 4


async def play(visits: int = 2) -> list[vf.Episode]:
    """Run episodes of two tasks, several at once, as the runner of verifiers does."""
    turns = {row["prompt"][-1]["content"]: (row["responses"], count()) for row in ROWS}

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        responses, turn = turns[body["messages"][-1]["content"]]
        message = {"role": "assistant", "content": responses[next(turn) * 3 % len(responses)]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        reply = {"id": "r", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return web.json_response(reply | {"usage": usage})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    port = site._server.sockets[0].getsockname()[1]
    agent = {"harness": {"id": "rank_env"}, "runtime": {"type": "subprocess"}}
    config = {"taskset": {"id": "rank_env"}, "agent": agent, "n": N, "max_concurrent_agents": None}
    env = vf.load_environment(vf.resolve_env_config(config))
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="POLICY_KEY")
    try:
        async with env.serving():
            context = vf.ModelContext("policy", client, vf.SamplingConfig())
            slots = [slot for task in env.taskset for slot in env.slots(task, visits)]
            return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("POLICY_KEY", "none")
    monkeypatch.setenv("RANK_STORE", str(tmp_path / "live.sqlite"))
    return tmp_path / "live.sqlite"


def test_the_rollouts_of_verifiers_have_the_rewards_of_their_group(store):
    assert verifiers.__version__ == "0.4.0"
    episodes = asyncio.run(play())
    assert [episode.errors for episode in episodes] == [[]] * 4 and all(episode.ok for episode in episodes)
    texts = [[trace.last_reply for trace in episode.traces] for episode in episodes]
    rewards = [[trace.reward for trace in episode.traces] for episode in episodes]
    recorded = {(visit.query_id, tuple(visit.rewards)): visit.step for visit in history.groups(read_store(store))}
    order = sorted(range(4), key=lambda i: recorded[ROWS[i // 2]["query_id"], tuple(rewards[i])])

    async def alone() -> dict[int, list]:
        async with GroupRanker("rankbuffer", RubricJudge()) as ranker:
            return {i: [*(await ranker.rank(ROWS[i // 2], texts[i])).rewards] for i in order}

    assert asyncio.run(alone()) == dict(enumerate(rewards)) and len(recorded) == 4
    assert all(len({*group}) > 1 for group in rewards)


def test_a_judge_that_is_away_fails_the_episode_and_scores_nothing(store, monkeypatch):
    async def away(self, messages, **asked):
        raise TransportError("connection refused")

    monkeypatch.setattr(RubricJudge, "complete", away)
    episodes = asyncio.run(play(visits=1))
    assert not any(episode.ok or any(trace.rewards for trace in episode.traces) for episode in episodes)
    assert all("rank it again once the judge answers" in episode.last_error.message for episode in episodes)
