"""RankBuffer in NeMo Gym, as a resources server. Written for NeMo Gym 0.5.1 (commit 07d6b0d), and not run inside it.

    entrypoint: nemo_gym_rewards.py
    num_rollouts_per_prompt: 8

NeMo Gym verifies one rollout at a time, so each waits here for the others of its task. A row of the data has
`query_id`. Export a `RANKBUFFER_GATHER` below the seconds between two visits of a task. If a rollout of the first one
never comes, the others then fail, and none of them is taken for one of the second.
"""

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import ConfigDict, Field
from rank_rewards import Gathering

gathering = Gathering()


class RankBufferConfig(BaseResourcesServerConfig):
    num_rollouts_per_prompt: int


class RankBufferRequest(BaseVerifyRequest):
    model_config = ConfigDict(extra="allow", populate_by_name=True)
    query_id: str
    task_index: int | None = Field(default=None, alias="_ng_task_index")


class RankBufferServer(SimpleResourcesServer):
    config: RankBufferConfig

    async def verify(self, body: RankBufferRequest) -> BaseVerifyResponse:
        key, size = (body.task_index, body.query_id), self.config.num_rollouts_per_prompt
        reward = await gathering.reward(key, size, body.response.output_text, query_id=body.query_id)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    RankBufferServer.run_webserver()
