"""RankBuffer in slime, as a group reward. Written for slime 0.3.1 (commit 624b824); it was not run inside slime.

    --group-rm --custom-rm-path slime_rewards.rank_group

A sample has `metadata["query_id"]` and is one sequence. `group_index` is the step: it counts all groups, and slime
saves it. Before a run goes on from a checkpoint, rewind the server to the `sample_group_index` that is saved there.
"""

from rank_rewards import filled, rank_rewards


async def rank_group(args, samples, **kwargs) -> list[float]:
    first = samples[0]
    texts = [sample.response for sample in samples]
    rewards = await rank_rewards(texts, query_id=first.metadata["query_id"], step=first.group_index)
    for sample, reward in zip(samples, rewards, strict=True):
        sample.remove_sample |= reward is None  # slime then leaves it out of the loss
    return filled(rewards)
