"""Rubrics that must hold: a response that breaks one stands below all responses of its group that keep them.

This is ours, and it holds for every reward method. First the judge decides about each response and each such rubric.
Then the method scores the responses that keep them, and apart from these those that break one. To the method, the
others are rollouts without an answer. So no response that breaks a rubric becomes an anchor. A method may keep the
reference responses of the data set as anchors: nobody asks about these.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..buffer import AnchorBuffer
from ..groups import Rollout, RolloutGroup
from ..judge import Judge, Question, must_question
from .method import GroupScore, RewardMethod


def must_questions(group: RolloutGroup) -> list[Question]:
    """Return one question per answered rollout and rubric that must hold, in this order."""
    musts = [rubric for rubric in group.query.rubrics if rubric.must]
    return [must_question(group.query, rubric, rollout.text) for rollout in group.answered for rubric in musts]


def count_calls(method: RewardMethod, group: RolloutGroup, first: bool) -> tuple[int, int]:
    """Return how many questions a group costs at least, if no rubric is broken, and at most. See [`RewardMethod`]."""
    least, most = method.calls(group, first)
    asked = len(must_questions(group))
    return least + asked, most * (2 if asked else 1) + asked


def most_calls(method: RewardMethod, group: RolloutGroup, first: bool) -> int:
    """Return how many questions a group costs at most."""
    return count_calls(method, group, first)[1]


async def score_group(
    method: RewardMethod, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge
) -> GroupScore:
    """Score a group by a method, with the rubrics that must hold.

    If all rollouts keep them, the rewards are those of the method. Else rewards move to [0, 1] where they are kept,
    and to [-1, -0.5] where one is broken. A rollout has no reward if a judgment about it failed, unless another one
    found a break. If all of them break a rubric, they have their places among themselves. Else a place below the
    others says something only if one of those that keep the rubrics is scored: without it, no answer has a reward.
    The arguments are those of [`RewardMethod`].
    """
    questions = must_questions(group)
    if not questions:
        return await method.score(group, buffer, judge)
    verdicts = await judge.ask_all(questions)
    each = len(questions) // len(group.answered)
    found = {rollout.id: verdicts[i * each : (i + 1) * each] for i, rollout in enumerate(group.answered)}
    broken = {i for i, row in found.items() if 0 in row}
    unknown = {i for i, row in found.items() if None in row} - broken
    kept = found.keys() - broken - unknown
    score = await method.score(group_without(group, broken | unknown), buffer, judge)
    if kept == found.keys():
        return score
    # Those without a reward are scored here for nothing: some methods have asked about them already.
    below = await method.score(group_without(group, kept), buffer, judge)
    if broken != found.keys() and all(score.rewards[i] is None for i in kept):
        return replace(score, rewards=tuple(None if i in found else r for i, r in enumerate(score.rewards)))
    rewards = list(score.rewards)
    for i in found:
        reward = None if i in unknown else below.rewards[i] if i in broken else rewards[i]
        rewards[i] = reward if reward is None else (reward - 3) / 4 if i in broken else (reward + 1) / 2
    return replace(
        score,
        rewards=tuple(rewards),
        order=(*tiers_of(below, broken), *tiers_of(score, kept)),
        positions=score.positions | {i: place for i, place in below.positions.items() if i in broken},
        fine_ranked=score.fine_ranked or below.fine_ranked,
    )


def group_without(group: RolloutGroup, ids: Collection[int]) -> RolloutGroup:
    """Return a group in which these rollouts have no answer."""
    rollouts = (Rollout(rollout.id, "") if rollout.id in ids else rollout for rollout in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


def tiers_of(score: GroupScore, ids: Collection[int]) -> Sequence[tuple[int, ...]]:
    """Return the order of these rollouts alone."""
    tiers = (tuple(i for i in tier if i in ids) for tier in score.order)
    return [tier for tier in tiers if tier]
