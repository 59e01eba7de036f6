"""RankBuffer with a language model in place of the update rules: the paper's LLM and LLM + look-ahead variants.

Source: paper, section "LLM buffer variants" and appendix "LLM Buffer Variants". The paper leaves three
points open. Here:

* The manager is the judge itself.
* The prompt around the printed instruction is ours (`judge/prompts/manage.txt`).
* An invalid selection is asked for again, like any malformed answer. If it stays invalid, the anchors stay as they
  are.
"""

from dataclasses import dataclass, replace

from ..buffer import Anchor, AnchorBuffer, initial_buffer
from ..groups import Query, RolloutGroup
from ..judge import Judge, selection_question
from ..ranking import Ranking, coarse_to_fine
from ._method import GroupScore, RewardMethod, score_by_ranking

SIZE = 4  # the paper's instruction asks for "exactly four"


@dataclass(frozen=True)
class LLMBuffer(RewardMethod):
    """A method that ranks against four anchors, which the judge selects at every visit.

    After a group is ranked, the manager sees query, rubrics and the combined ladder of anchors and rollouts. It
    selects four of them, verbatim and in the established order. The method asks 1 question per answered rollout, 1 per
    interval with two or more of them, and 1 question to the manager.

    Args:
        look_ahead (`bool`, *optional*, defaults to `False`):
            Ask the manager at the query's next visit, and show it that visit's rollouts, which it may not select.
            Until then the stored buffer holds the ranked rollouts as anchors of the source `candidate`. If that visit
            has no answered rollout, the manager is asked at the visit after it.
    """

    look_ahead: bool = False
    name = "llm_buffer"
    responses_needed = SIZE

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        buffer = buffer or initial_buffer(group.query.responses, SIZE)
        to_select = any(anchor.source == "candidate" for anchor in buffer.anchors)  # as after a look-ahead
        if group.answered and to_select:
            seen = [rollout.text for rollout in group.answered]
            buffer = await self._select(group.query, buffer, seen, judge)
        ranking = await coarse_to_fine(group.query, buffer, group.answered, judge)
        after = ladder(buffer, ranking, group)
        if not self.look_ahead and len(after) > SIZE:  # four anchors alone leave nothing to select
            after = await self._select(group.query, after, [], judge)
        return score_by_ranking(group, ranking, buffer, after.visited())

    async def _select(self, query: Query, ladder: AnchorBuffer, seen: list[str], judge: Judge) -> AnchorBuffer:
        """Return the four that the manager selects as a buffer."""
        counts = {"A": 0, "R": 0}
        names = []
        for anchor in ladder.anchors:
            letter = "R" if anchor.source == "candidate" else "A"
            names.append(f"{letter}{counts[letter]}")
            counts[letter] += 1
        shown = [(name, anchor.text) for name, anchor in zip(names, ladder.anchors, strict=True)]
        chosen = await judge.ask(selection_question(query, shown, seen, SIZE))
        if chosen is None:
            chosen = [name for name in names if name[0] == "A"]  # no valid answer: the anchors stay as they are
        selected = (anchor for name, anchor in zip(names, ladder.anchors, strict=True) if name in chosen)
        return replace(
            ladder, anchors=tuple(replace(a, source="selected") if a.source == "candidate" else a for a in selected)
        )

    def most_shown(self, G: int) -> int:
        return SIZE + G + G * self.look_ahead  # the manager sees the ladder and, with look-ahead, the next group

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        n = len(group.answered)
        if self.look_ahead:
            return n, n + n // 2 + (n > 0 and not first)
        return n + (n > 0), n + n // 2 + (n > 0)


def ladder(buffer: AnchorBuffer, ranking: Ranking, group: RolloutGroup) -> AnchorBuffer:
    """Return anchors and ranked rollouts in their established order, worst to best."""
    rungs: list[Anchor] = []
    for p, rollouts in enumerate(ranking.sigma):  # in the order of sampling where the fine ranking failed
        rungs += [Anchor(f"{group.step}-{r.id}", r.text, "candidate", group.known_epoch) for r in rollouts]
        rungs += buffer.anchors[p : p + 1]
    return replace(buffer, anchors=tuple(rungs))


METHOD = LLMBuffer
