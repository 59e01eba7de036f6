"""Tournament-GRPO: the number of matches won in repeated knockout tournaments.

Source: paper, appendix "Baseline Implementation Details": "three independently shuffled binary tournaments for each
group of eight rollouts, requiring 21 logical comparisons". The paper's 84,000 calls are 21 for each of its 4,000
groups, so rollouts without an answer play, too. The authors' code for Tournament-GRPO (PuffYang/Tournament_GRPO on
GitHub) says how, and how points become rewards:

* A rollout without an answer enters as an empty text: the judge sees its label with nothing below it. It can win, also
  against another empty one. Its reward is -1 whatever it won. If no rollout has an answer, nothing is asked.
* Reward: the points over all tournaments, mapped from their range in the group to [-1, 1] (there to [0, 1]). If all
  are equal, it is 0.

The rest is open. Here:

* The pairs of every round are drawn at random. If the number of candidates is odd, the last one drawn reaches the next
  round without a match and without a point.
* A match has a winner and no tie. If its judgment fails, no candidate gets a point, and the one that the judge saw
  first reaches the next round.
* A rollout whose matches all failed is unscored.
* The prompt is ours (`judge/prompts/pairwise.txt`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge
from ..settings import check_at_least
from ._matches import Candidate, Match, Points, make_match, play_matches, spread_out
from ._method import GroupScore, RewardMethod, score_by_reward
from ._presentation import shuffle


@dataclass(frozen=True)
class Tournament(RewardMethod):
    """A method whose reward is the number of matches won in `repeats` knockout tournaments.

    It asks `repeats (G - 1)` questions about a group of `G` rollouts: 21 for 8. Those without an answer play as empty
    texts. The next rounds of all tournaments are asked at once.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            The seed of pairs and order of presentation. A recipe sets it to the run's seed.
        repeats (`int`, *optional*, defaults to `3`):
            The number of tournaments, at least 1.

    Raises:
        [`SettingsError`]: if an argument is out of range.
    """

    seed: int = 0
    repeats: int = 3
    name = "tournament"

    def __post_init__(self):
        check_at_least(self, repeats=1)

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        ids = players(group)
        points: dict[Candidate, float] = {}  # of those with at least one successful judgment
        remaining: list[list[Candidate]] = [ids] * self.repeats
        while any(len(candidates) > 1 for candidates in remaining):
            # "independently shuffled": each tournament draws its own next round. All these matches are asked at once.
            rounds = [self._draw(group, candidates, repeat) for repeat, candidates in enumerate(remaining)]
            played = iter(await play_matches([match for matches, _ in rounds for match in matches], judge))
            remaining = []
            for matches, bye in rounds:
                results = [next(played) for _ in matches]
                remaining.append([winner(*pair) for pair in zip(matches, results, strict=True)] + bye)
                for result in results:
                    for candidate, point in (result or {}).items():
                        points[candidate] = points.get(candidate, 0.0) + point

        rewards = spread_out({i: points.get(i) for i in ids})
        return score_by_reward(group, {rollout.id: rewards[rollout.id] for rollout in group.answered})

    def _draw(
        self, group: RolloutGroup, candidates: Sequence[Candidate], repeat: int
    ) -> tuple[list[Match], list[Candidate]]:
        """Return the matches of a tournament's next round, and the candidate without a match, if there is one."""
        purpose = (repeat, len(candidates))  # so that each round of each tournament is drawn anew
        drawn = shuffle(candidates, self.seed, group, purpose)
        texts: dict[Candidate, str] = {rollout.id: rollout.text for rollout in group.rollouts}
        pairs = zip(drawn[::2], drawn[1::2], strict=False)
        matches = [make_match(group, pair, texts, self.seed, purpose, tie=False) for pair in pairs]
        return matches, drawn[len(matches) * 2 :]

    def most_shown(self, G: int) -> int:
        return 2

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = self.repeats * max(len(players(group)) - 1, 0)
        return n, n


def players(group: RolloutGroup) -> list[Candidate]:
    return [rollout.id for rollout in group.rollouts] if group.answered else []  # those without an answer play too


def winner(match: Match, result: Points | None) -> Candidate:
    # A failed judgment gives no point, but one has to go on.
    return max(match.shown, key=result.__getitem__) if result else match.shown[0]


METHOD = Tournament
