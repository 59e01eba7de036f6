"""RankBuffer in verl, as a reward manager. Written for verl 0.10.0.dev (commit 1dda039); it was not run inside verl.

    reward.num_workers=1 reward.reward_manager.source=importlib reward.reward_manager.name=RankBufferManager \
        reward.reward_manager.module.path=examples/clients/verl_rewards.py

verl asks for one rollout at a time, so they are gathered by `uid`. That needs one worker, and Ray lets one worker hold
1,000 rollouts at once. A row has `extra_info.query_id`. Rows with another `extra_info.split` than `train` change no
buffer.
"""

from rank_rewards import Gathering
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


class RankBufferManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, **kwargs):
        super().__init__(config, tokenizer, compute_score)
        self.rollout = config.actor_rollout_ref.rollout
        self.gathering = Gathering()

    async def run_single(self, data) -> dict:
        item = data[-1:][0]  # the last sequence of the rollout
        ids, row = item.batch["responses"], item.non_tensor_batch
        length = int(item.batch["attention_mask"][-len(ids) :].sum())
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        train = row["extra_info"].get("split", "train") == "train"
        size = self.rollout.n if train else self.rollout.val_kwargs.n
        query_id = str(row["extra_info"]["query_id"])
        reward = await self.gathering.reward(str(row["uid"]), size, text, query_id=query_id, train=train)
        return {"reward_score": reward, "reward_extra_info": {"acc": reward}}
