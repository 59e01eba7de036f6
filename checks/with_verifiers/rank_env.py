"""An environment of verifiers whose groups are ranked: `n` attempts at a task, and rank rewards in `finalize`."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.envs.best_of_n import BestOfNEnv

from rankbuffer_trl import GroupRanker
from rankbuffer_trl.judge import RubricJudge

__all__ = ["OneQuestion", "Queries", "RankEnv"]

DATA = Path(__file__).parents[2] / "recipes" / "quickstart" / "howto.jsonl"


class QueryData(vf.TaskData):
    row: dict


class QueryTask(vf.Task[QueryData, vf.State, vf.TaskConfig]):
    pass


class Queries(vf.Taskset[QueryTask, vf.TasksetConfig]):
    def load(self) -> Iterable[QueryTask]:
        for line in DATA.read_text().splitlines()[:2]:
            row = json.loads(line)
            yield QueryTask(QueryData(prompt=row["prompt"][-1]["content"], row=row), self.config.task)


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    """A harness that asks the policy once. It needs no program and no container."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return vf.ProgramResult(answer.is_error, answer.text, "")


class RankEnv(BestOfNEnv):
    async def start(self) -> None:
        self.ranker = GroupRanker("rankbuffer", RubricJudge(), os.environ.get("RANK_STORE"))

    async def stop(self) -> None:
        await self.ranker.close()

    async def finalize(self, task: QueryTask, episode: vf.Episode) -> None:
        score = await self.ranker.rank(task.data.row, [trace.last_reply for trace in episode.traces])
        for trace, reward in zip(episode.traces, score.rewards, strict=True):
            if reward is None:
                trace.agent.trainable = False  # its judgment failed, and a failure is no score
            else:
                trace.record_reward("rank", reward)
