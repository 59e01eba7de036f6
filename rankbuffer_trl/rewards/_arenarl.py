"""ArenaRL: a seeded single-elimination tournament whose matches are judged in both orders of presentation.

Source: paper, appendix "Baseline Implementation Details", paragraph "ArenaRL". The first rollout is a deterministic
seed response. Every other rollout is compared with it. Then a seeded single elimination follows. Each logical match is
judged in both orders, so 8 rollouts take 14 matches and 28 judgments. The paper leaves these points open. Here:

* The judge scores both responses of a match from 0 to 10. The score of a rollout in a match is its mean over both
  orders.
* Rollouts are seeded by their own score against the first rollout, and the first rollout by its mean over those
  matches. A rollout whose judgments all failed is seeded last.
* Higher seeds meet late (1-8, 4-5, 2-7, 3-6). If their number is no power of two, the highest seeds have byes.
* The higher seed wins a tied match, and a match of which both judgments failed. If one judgment failed, the other
  decides.
* Final order: the champion, then the losers of the last round, then those of the round before, and so on. The losers
  of one round are ordered by their mean score over all their matches. Equal means tie. The reward is linear in the
  order.
* A rollout whose judgments all failed is unscored.
* The prompt is ours (`judge/prompts/duel.txt`). If the first rollout has no answer, the first one with an answer takes
  its place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge, Question, duel_question
from ._method import GroupScore, RewardMethod, score_by_order

IdPair = tuple[int, int]
BYE = -1  # the place in the bracket of an opponent that does not exist


@dataclass(frozen=True)
class ArenaRL(RewardMethod):
    """A method whose reward is the place in a seeded single elimination, from -1 to 1.

    It asks `4 (n - 1)` questions for `n` answered rollouts: 28 for 8. Each pair is judged in both orders, so the order
    of presentation needs no randomness.
    """

    name = "arenarl"

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        ids = [rollout.id for rollout in group.answered]
        match_scores: list[dict[int, float]] = []  # the scores of each match, where a judgment succeeded

        def mean(i: int) -> float:
            scores = [match[i] for match in match_scores if i in match]
            return fmean(scores) if scores else -1.0  # below every score

        # "compares each sampled rollout against that seed"
        match_scores += (await self._play(group, [(ids[0], i) for i in ids[1:]], judge)).values()
        seeded = sorted(ids, key=mean, reverse=True)

        # "then runs a seeded single-elimination tournament"
        bracket = draw_bracket(seeded)
        out: list[list[int]] = []  # losers by round
        while len(bracket) > 1:
            pairs = list(zip(bracket[::2], bracket[1::2], strict=True))
            results = await self._play(group, [pair for pair in pairs if BYE not in pair], judge)
            match_scores += results.values()
            winners = [pick_winner(pair, results.get(pair, {}), seeded) for pair in pairs]
            out.append([i for i in bracket if i not in winners and i != BYE])
            bracket = winners

        # Losers of a later round are above those of an earlier one. A single rollout needs no match.
        scored = [[i for i in ids_out if mean(i) >= 0 or len(ids) == 1] for ids_out in [*out, bracket]]
        order = [tier for ids_out in scored for tier in tiers(ids_out, mean)]
        return score_by_order(group, order)

    async def _play(
        self, group: RolloutGroup, pairs: Sequence[IdPair], judge: Judge
    ) -> dict[IdPair, dict[int, float]]:
        """Return the mean scores of each pair's rollouts over both orders; nothing if both judgments failed."""
        verdicts = await judge.ask_all(pair_questions(group, pairs))
        results = {}
        for (a, b), forth, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            # `back` has them in the reverse order.
            judged = [scores for scores in (forth, back and back[::-1]) if scores is not None]
            by_rollout = zip(*judged, strict=True)  # the scores of a, then those of b
            results[a, b] = {i: fmean(scores) for i, scores in zip((a, b), by_rollout, strict=False)}
        return results

    def most_shown(self, G: int) -> int:
        return 2

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = 4 * max(len(group.answered) - 1, 0)
        return n, n


def pair_questions(group: RolloutGroup, pairs: Sequence[IdPair]) -> list[Question]:
    texts = {rollout.id: rollout.text for rollout in group.rollouts}
    return [
        duel_question(group.query, texts[first], texts[second]) for a, b in pairs for first, second in ((a, b), (b, a))
    ]


def draw_bracket(seeded: Sequence[int]) -> list[int]:
    """Return the bracket: neighbours meet, and seeds 1 and 2 only in the last match."""
    places = [0]
    while len(places) < len(seeded):
        places = [place for p in places for place in (p, 2 * len(places) - 1 - p)]
    return [seeded[place] if place < len(seeded) else BYE for place in places]  # the highest seeds have byes


def pick_winner(pair: IdPair, scores: Mapping[int, float], seeded: Sequence[int]) -> int:
    """Return the rollout with the higher score in a match; the higher seed if there is no difference."""
    if BYE in pair:  # only the second place of a pair can be empty
        return pair[0]
    return min(pair, key=lambda i: (-scores.get(i, 0.0), seeded.index(i)))


def tiers(ids: Sequence[int], mean: Callable[[int], float]) -> list[tuple[int, ...]]:
    """Return `ids` in tiers from worst to best."""
    return [tuple(tier) for _, tier in groupby(sorted(ids, key=mean), key=mean)]  # equal means tie


METHOD = ArenaRL
