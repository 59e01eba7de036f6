"""ArenaRL: a seeded single-elimination tournament whose matches are scored in both orders of presentation.

Source: paper, appendix "Baseline Implementation Details", paragraph "ArenaRL": the first rollout is a deterministic
seed response, every other one is compared with it, then a seeded single elimination follows; each logical match is
judged in both orders, so 8 rollouts take 14 matches and 28 judgments. Left open there, and settled here:

* The judge scores both responses of a match from 0 to 10; a rollout's score in it is the mean over the two orders.
* A rollout's seed is its own score against the first rollout; the first rollout's is the mean over its matches.
* Higher seeds meet late (1-8, 4-5, 2-7, 3-6). Where their number is no power of two, the highest ones have byes.
* A tied match goes to the higher seed. So does one of which both judgments failed; if one failed, the other decides.
* Final order: the champion, then the losers of the last round, of the one before, and so on; those of one round by
  their mean score over all their matches, equal ones tied. The reward is linear in it.
* A rollout of which no judgment was heard is unscored. Its seed is the lowest.
* The prompt (`judge/prompts/duel.txt` is ours), and which rollout is first if the first has no answer (the next one).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge, Question, duel_question
from ..ranking import rank_rewards
from .method import GroupScore

Pair = tuple[int, int]
BYE = -1  # stands where a rollout has nobody to play


@dataclass(frozen=True)
class ArenaRL:
    """Rank in a seeded single elimination, from -1 to 1.

    Asks `4 (n - 1)` questions for `n` answered rollouts: 28 for 8. Each pair is judged in both orders, so the order of
    presentation needs no randomness.
    """

    name = "arenarl"
    responses_needed = 0

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        ids = [rollout.id for rollout in group.answered]
        empty = [rollout.id for rollout in group.empty]
        heard: dict[int, list[float]] = defaultdict(list)

        async def play(pairs: Sequence[Pair]) -> None:
            """Both orders of each pair; what was heard goes to `heard`."""
            asked = [(pair, order) for pair in pairs for order in (pair, pair[::-1])]
            verdicts = await judge.ask_all(self._question(group, order) for _, order in asked)
            scores: dict[Pair, dict[int, list[int]]] = {pair: defaultdict(list) for pair in pairs}
            for (pair, order), verdict in zip(asked, verdicts, strict=True):
                for i, s in zip(order, verdict or (), strict=False):
                    scores[pair][i].append(s)
            results.update({pair: {i: fmean(s) for i, s in by_id.items()} for pair, by_id in scores.items()})
            for pair in pairs:
                for i, s in results[pair].items():
                    heard[i].append(s)

        results: dict[Pair, dict[int, float]] = {}
        await play([(ids[0], i) for i in ids[1:]] if ids else [])
        seeded = sorted(ids, key=lambda i: -fmean(heard[i]) if heard[i] else float("inf"))
        out: list[list[int]] = []
        bracket = draw(seeded)
        while len(bracket) > 1:
            matches = [(a, b) for a, b in zip(bracket[::2], bracket[1::2], strict=True) if b != BYE]
            await play(matches)
            bracket, lost = advance(bracket, results, seeded)
            out.append(lost)
        order = [tier for lost in out for tier in by_mean(lost, heard)] + [tuple(bracket)] * bool(ids)
        if len(ids) > 1:
            order = [tier for tier in (tuple(i for i in tier if heard[i]) for tier in order) if tier]
        return GroupScore(rank_rewards(order, len(group.rollouts), empty), tuple(order))

    @staticmethod
    def _question(group: RolloutGroup, shown: Pair) -> Question:
        texts = {rollout.id: rollout.text for rollout in group.rollouts}
        return duel_question(group.query, texts[shown[0]], texts[shown[1]])

    def first_questions(self, group: RolloutGroup) -> list[Question]:
        """See [`RewardMethod`]. The seeding matches."""
        ids = [rollout.id for rollout in group.answered]
        return [self._question(group, shown) for i in ids[1:] for shown in ((ids[0], i), (i, ids[0]))]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]."""
        n = 4 * max(len(group.answered) - 1, 0)
        return n, n


def draw(seeded: Sequence[int]) -> list[int]:
    """The bracket: neighbours meet, and seeds 1 and 2 only in the last match; `BYE` where there is nobody."""
    places = [0]
    while len(places) < len(seeded):
        places = [place for p in places for place in (p, 2 * len(places) - 1 - p)]
    return [seeded[place] if place < len(seeded) else BYE for place in places]


def advance(
    bracket: Sequence[int], results: dict[Pair, dict[int, float]], seeded: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Winners, who make the next bracket, and losers of a round."""
    winners, losers = [], []
    for a, b in zip(bracket[::2], bracket[1::2], strict=True):
        if b == BYE:
            winners.append(a)
            continue
        scores = results[a, b]
        better, worse = sorted((a, b), key=lambda i: (-scores.get(i, 0.0), seeded.index(i)))
        winners.append(better)
        losers.append(worse)
    return winners, losers


def by_mean(ids: Sequence[int], heard: dict[int, list[float]]) -> list[tuple[int, ...]]:
    """Tiers of `ids` from worst to best by their mean score over all matches."""
    mean = {i: fmean(heard[i]) if heard[i] else float("-inf") for i in ids}
    return [tuple(tier) for _, tier in groupby(sorted(ids, key=mean.__getitem__), key=mean.__getitem__)]


METHOD = ArenaRL
