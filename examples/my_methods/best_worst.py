"""Ask which rollout of a group is the best, and which is the worst."""

from dataclasses import dataclass

from rankbuffer_trl import GroupScore, Judge
from rankbuffer_trl.buffer import AnchorBuffer
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Question, Verdict, VerdictError, either, one_of
from rankbuffer_trl.rewards import RewardMethod, score_by_reward

TEMPLATE = """Find the best and the worst of these answers to the query.

QUERY
{QUERY}

ANSWERS
{ANSWERS}

Return JSON only, with the numbers of two different answers: {"best": 0, "worst": 1}"""


def best_worst_verdict(ids: list[int]) -> Verdict:
    """Expect `{"best": i, "worst": j}` with two different ids."""

    def check(best: object, worst: object) -> tuple[object, object]:
        if best not in ids or worst not in ids or best == worst:
            raise VerdictError(f"`best` and `worst` must be two different numbers of {ids}")  # the judge reads this
        return best, worst

    regex = rf'\{{"best": {either(ids)}, "worst": {either(ids)}\}}'
    number = one_of("integer", ids)
    return Verdict({"best": max(ids), "worst": max(ids)}, {"regex": regex}, {"best": number, "worst": number}, check)


@dataclass(frozen=True)
class BestWorst(RewardMethod):
    """The reward is 1 for the best rollout, -1 for the worst and 0 for the others."""

    name = "best_worst"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        ids = [rollout.id for rollout in group.answered]
        rewards: dict[int, float | None] = dict.fromkeys(ids, 0.0)
        if len(ids) > 1:
            texts = {"{QUERY}": group.query.text}
            responses = {"{ANSWERS}": [(f"R{rollout.id}", rollout.text) for rollout in group.answered]}
            verdict = best_worst_verdict(ids)
            found = await judge.ask(Question("best_worst", group.query.id, verdict, TEMPLATE, texts, responses))
            # If the judgment failed, no rollout is scored.
            rewards = dict.fromkeys(ids) if found is None else rewards | {found[0]: 1.0, found[1]: -1.0}
        return score_by_reward(group, rewards)
