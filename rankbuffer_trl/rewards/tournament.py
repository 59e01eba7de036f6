"""Tournament-GRPO: the number of matches won in repeated knockout tournaments.

Source: paper, appendix "Baseline Implementation Details": "three independently shuffled binary tournaments for each
group of eight rollouts, requiring 21 logical comparisons". Left open there, and settled here:

* Pairings are drawn afresh in every round. Where the number of candidates is odd, the last one drawn goes on without a
  match and without a point.
* A match has a winner and no tie. If its judgment fails, nobody gets a point, and the candidate shown first goes on.
* Reward: the points over all repeats, mapped from their range in the group to [-1, 1]; all equal gives 0. A rollout
  without an answer plays no match and stands one point below zero, so it has -1.
* A rollout whose matches all failed is unscored.
* The prompt (`judge/prompts/pairwise.txt` is ours).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..buffer import AnchorBuffer
from ..errors import SettingsError
from ..groups import RolloutGroup
from ..judge import Judge, Question
from .matches import Candidate, Match, Points, make_match, play
from .method import GroupScore, score_by_reward
from .presentation import shuffle


@dataclass(frozen=True)
class Tournament:
    """Wins in `repeats` knockout tournaments.

    Asks `repeats (n - 1)` questions for `n` answered rollouts: 21 for 8. Rounds follow one another; the tournaments
    are played side by side.

    Raises:
        [`SettingsError`]: for an argument out of range.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Of pairings and order of presentation; a recipe gives the run's seed.
        repeats (`int`, *optional*, defaults to `3`):
            Tournaments.
    """

    seed: int = 0
    repeats: int = 3
    name = "tournament"
    responses_needed = 0

    def __post_init__(self):
        if self.repeats < 1:
            raise SettingsError(f"repeats must be at least 1, got {self.repeats}")

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        ids = [rollout.id for rollout in group.answered]
        points: dict[Candidate, float] = dict.fromkeys(ids, 0.0)
        heard: set[Candidate] = set()
        left: list[list[Candidate]] = [list(ids) for _ in range(self.repeats)]
        while any(len(candidates) > 1 for candidates in left):
            rounds = [self._draw(group, candidates, repeat) for repeat, candidates in enumerate(left)]
            played = iter(await play([match for matches, _ in rounds for match in matches], judge))
            left = []
            for matches, bye in rounds:
                results = [(match, next(played)) for match in matches]
                left.append([winner(match, result) for match, result in results] + bye)
                for candidate, point in (pair for _, result in results if result for pair in result.items()):
                    points[candidate] += point
                    heard.add(candidate)
        known = [points[i] for i in ids if i in heard or len(ids) == 1] + [-1.0] * len(group.empty)
        low, high = min(known, default=0.0), max(known, default=0.0)
        rewards: dict[int, float | None] = dict.fromkeys(ids)
        for i in ids:
            if i in heard or len(ids) == 1:
                rewards[i] = 2 * (points[i] - low) / (high - low) - 1 if high > low else 0.0
        return score_by_reward(group, rewards)

    def _draw(
        self, group: RolloutGroup, candidates: Sequence[Candidate], repeat: int
    ) -> tuple[list[Match], list[Candidate]]:
        """The matches of a tournament's next round, and who goes on without one."""
        purpose = (repeat, len(candidates))
        drawn = shuffle(candidates, self.seed, group, purpose)
        texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.rollouts}
        pairs = zip(drawn[::2], drawn[1::2], strict=False)
        matches = [make_match(group, pair, texts, self.seed, purpose, tie=False) for pair in pairs]
        return matches, drawn[len(matches) * 2 :]

    def first_questions(self, group: RolloutGroup) -> list[Question]:
        """See [`RewardMethod`]. The first round of each tournament."""
        ids = [rollout.id for rollout in group.answered]
        rounds = (self._draw(group, ids, repeat)[0] for repeat in range(self.repeats))
        return [match.question for matches in rounds for match in matches]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]."""
        n = self.repeats * max(len(group.answered) - 1, 0)
        return n, n


def winner(match: Match, result: Points | None) -> Candidate:
    """Who goes on: the one with the point; the first if there is none."""
    return max(match.shown, key=result.__getitem__) if result else match.shown[0]


METHOD = Tournament
