"""RankBuffer in NeMo Gym, as a resources server. Written for NeMo Gym 0.5.1 (commit 07d6b0d), and not run inside it.

    entrypoint: nemo_gym_rewards.py
    num_rollouts_per_prompt: 8

NeMo Gym verifies one rollout at a time, so each waits here for the others of its group. A row of the data has
`query_id`. The trainer sends what later versions of NeMo Gym demand of groups: `_ng_group_id`, which is new at each
visit of a task, `_ng_rollout_index`, and `_ng_group_attempt` if it samples a group again. A task alone cannot tell the
rollouts of two visits apart.
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
    group_id: str = Field(alias="_ng_group_id")
    rollout_index: int = Field(alias="_ng_rollout_index")
    group_attempt: int = Field(default=0, alias="_ng_group_attempt")


class RankBufferServer(SimpleResourcesServer):
    config: RankBufferConfig

    async def verify(self, body: RankBufferRequest) -> BaseVerifyResponse:
        size, member = self.config.num_rollouts_per_prompt, body.rollout_index
        visit = body.group_id, size, body.response.output_text, member, body.group_attempt
        reward = await gathering.reward(*visit, query_id=body.query_id)
        return BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    RankBufferServer.run_webserver()
