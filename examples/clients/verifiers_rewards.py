"""RankBuffer in verifiers, as a group reward of a rubric. Written for verifiers after 0.3.0 (commit a60a606).

    rubric = vf.Rubric(funcs=[rank_group])

It was not run inside a trainer. The classic interface is meant (`verifiers.legacy`, which `import verifiers as vf`
gives). A row has `info["query_id"]`. If the server refuses a group, verifiers logs why and gives 0 to all of it.
"""

from rank_rewards import filled, rank_rewards


async def rank_group(completions, infos) -> list[float]:
    texts = [one if isinstance(one, str) else one[-1]["content"] or "" for one in completions]
    return filled(await rank_rewards(texts, query_id=infos[0]["query_id"]))
