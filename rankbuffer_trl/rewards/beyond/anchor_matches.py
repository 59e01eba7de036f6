"""Anchor matches: each rollout is compared with each anchor of a pool, and a Bradley-Terry fit gives the order.

Source: Reasoning Arena (Zhou et al. 2026, arXiv:2606.09380): "each new trace is evaluated against a small, dynamically
updated pool of previously generated traces as anchors", then "a Bradley-Terry model on the incomplete comparison
graph". It is in no table of the RankBuffer paper. These points are ours:

* The pool of a query is its buffer in the store. At a query's first visit, random rollouts of the group are the pool.
* After a visit, the new pool is an even choice, with both ends, of anchors and rollouts in the fitted order.
* The fit has one tie of each response with a response of strength 1, so that no strength is infinite.
* Reward: the mean probability of winning against the other rollouts of the group, from -1 to 1.
* The prompt is that of the pairwise methods (`judge/prompts/pairwise.txt`); a tie is half a win to each.

In the miniature, two lists train as well with 0.13 of its tokens to 85 points (`experiments/race`). The method is here
for comparison with RankBuffer: it is a published relative whose anchors persist from visit to visit, too.

Reasoning Arena judges only groups that verifiable rewards leave tied. Here every group is judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ...buffer import Anchor, AnchorBuffer, select_k0
from ...groups import RolloutGroup
from ...judge import Judge
from ...settings import check_at_least
from ..matches import Candidate, Match, PlaysMatches, Points, make_match, play_matches
from ..method import GroupScore, score_by_reward
from ..presentation import shuffle

ROUNDS = 200  # of the fit; strengths of 12 responses then change by less than 1e-6


@dataclass(frozen=True)
class AnchorMatches(PlaysMatches):
    """A method that compares rollouts with the anchors of a pool, and orders both by a Bradley-Terry fit.

    It asks `size` questions per answered rollout: 32 for 8. At a query's first visit the pool is part of the group:
    22 for 8. A rollout without an answer has the reward -1. A rollout whose comparisons all failed is unscored and
    enters no pool.

    Args:
        size (`int`, *optional*, defaults to `4`):
            The number of anchors of a pool, at least 2.
        seed (`int`, *optional*, defaults to `0`):
            The seed of the first pool and of the order of presentation. A recipe sets it to the run's seed.

    Raises:
        [`SettingsError`]: if an argument is out of range.
    """

    size: int = 4
    seed: int = 0
    name = "anchor_matches"

    def __post_init__(self):
        check_at_least(self, size=2)

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        played = [points for points in await play_matches(self.matches(group, buffer), judge) if points is not None]
        strength = strengths(played)
        ids = [rollout.id for rollout in group.answered]
        if len(ids) == 1 and buffer is None:
            strength[ids[0]] = 1.0  # there is nothing to ask
        known = [i for i in ids if i in strength]
        rewards: dict[int, float | None] = dict.fromkeys(ids)
        for i in known:
            chances = [strength[i] / (strength[i] + strength[j]) for j in known if j != i] + [1.0] * len(group.empty)
            rewards[i] = 2 * fmean(chances) - 1 if chances else 0.0
        after = self._pool(group, buffer, strength)
        return replace(score_by_reward(group, rewards), before=buffer, after=after)

    def matches(self, group: RolloutGroup, buffer: AnchorBuffer | None = None) -> list[Match]:
        """Return a match of each answered rollout with each other response of the pool."""
        texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.answered}
        pool: list[Candidate] = shuffle(texts, self.seed, group, "pool")[: self.size]
        if buffer is not None:
            pool = [anchor.id for anchor in buffer.anchors]
            texts.update((anchor.id, anchor.text) for anchor in buffer.anchors)
        met = dict.fromkeys(frozenset((r.id, other)) for r in group.answered for other in pool if r.id != other)
        pairs = [tuple(sorted(pair, key=str)) for pair in met]
        return [make_match(group, (first, second), texts, self.seed) for first, second in pairs]

    def _pool(
        self, group: RolloutGroup, buffer: AnchorBuffer | None, strength: dict[Candidate, float]
    ) -> AnchorBuffer | None:
        """Return the pool of the next visit; the present one if fewer than two responses have a strength."""
        if len(strength) < 2:
            return buffer and buffer.visited()
        ladder: dict[Candidate, Anchor] = {anchor.id: anchor for anchor in buffer.anchors} if buffer else {}
        for rollout in group.answered:
            name = f"{group.step}-{rollout.id}"
            ladder[rollout.id] = Anchor(name, rollout.text, "selected", group.known_epoch)
        rising = sorted(strength, key=strength.__getitem__)
        anchors = tuple(ladder[name] for name in select_k0(rising, self.size))
        return (replace(buffer, anchors=anchors) if buffer else AnchorBuffer(anchors)).visited()

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]. A stored pool is smaller than `size` if the group that made it was smaller."""
        n = len(group.answered)
        return super().calls(group, first) if first else (2 * n, self.size * n)

    def number(self, n: int) -> int:
        """See [`PlaysMatches`]. Members of the first pool meet one another once."""
        s = min(self.size, n)
        return s * (n - s) + s * (s - 1) // 2


def strengths(played: Sequence[Points]) -> dict[Candidate, float]:
    """Return the Bradley-Terry strength of each response that was in a match, in (0, inf), by Zermelo's iteration."""
    names = list(dict.fromkeys(name for points in played for name in points))
    strength = dict.fromkeys(names, 1.0)
    won = {name: 0.5 + sum(points.get(name, 0.0) for points in played) for name in names}
    met = {name: [other for points in played if name in points for other in points if other != name] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            expected = 1 / (strength[name] + 1) + sum(1 / (strength[name] + strength[other]) for other in met[name])
            strength[name] = won[name] / expected
    return strength


METHOD = AnchorMatches
