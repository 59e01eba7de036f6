"""RankBuffer with a language model in place of the update rules: the paper's LLM and LLM + look-ahead variants.

Source: paper, section "LLM buffer variants" and appendix "LLM Buffer Variants". Left open there, and settled here: the
manager is the judge itself, the prompt around the printed instruction is ours (`judge/prompts/manage.txt`), and an
invalid selection is asked for again, as any malformed answer is, before it leaves the buffer unchanged.
"""

from dataclasses import dataclass, replace

from ..buffer import Anchor, AnchorBuffer, initial_buffer
from ..groups import Query, RolloutGroup
from ..judge import Judge, Question, insertion_question, selection_question
from ..ranking import Ranking, coarse_to_fine, rank_rewards
from .method import GroupScore

SIZE = 4  # the instruction asks for "exactly four"


@dataclass(frozen=True)
class LLMBuffer:
    """Coarse-to-fine ranking against four anchors, which the judge chooses anew at every visit.

    After a group is ranked, the manager sees query, rubrics and the combined ladder of anchors and rollouts, and
    selects four of them, verbatim and in the established order. Asks 1 question per answered rollout, 1 per interval
    with two or more of them, and 1 of the manager.

    Args:
        look_ahead (`bool`, *optional*, defaults to `False`):
            Put the manager's question off to the query's next visit, and show it that visit's rollouts, which it may
            not choose. Until then the ranked rollouts stand in the stored buffer as anchors of the source `candidate`.
            A visit without any answer asks nothing, and the decision waits for the one after.
    """

    look_ahead: bool = False
    name = "llm_buffer"
    responses_needed = SIZE

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """See [`RewardMethod`]."""
        buffer = buffer or initial_buffer(group.query.responses, SIZE)
        if group.answered and any(anchor.source == "candidate" for anchor in buffer.anchors):
            seen = [rollout.text for rollout in group.answered]
            buffer = await self._select(group.query, buffer, seen, judge)
        ranking = await coarse_to_fine(group.query, buffer, group.answered, judge)
        after = ladder(buffer, ranking, group)
        if not self.look_ahead and len(after) > SIZE:
            after = await self._select(group.query, after, [], judge)
        empty = [rollout.id for rollout in group.empty]
        return GroupScore(
            rewards=rank_rewards(ranking.order, len(group.rollouts), empty),
            order=ranking.order,
            positions=ranking.positions,
            fine_ranked=any(len(rollouts) >= 2 for rollouts in ranking.sigma),
            before=buffer,
            after=after.visited(),
        )

    async def _select(self, query: Query, ladder: AnchorBuffer, seen: list[str], judge: Judge) -> AnchorBuffer:
        """The four that the manager chooses; the present anchors if it does not answer validly."""
        counts = {"A": 0, "R": 0}
        names = []
        for anchor in ladder.anchors:
            letter = "R" if anchor.source == "candidate" else "A"
            names.append(f"{letter}{counts[letter]}")
            counts[letter] += 1
        shown = [(name, anchor.text) for name, anchor in zip(names, ladder.anchors, strict=True)]
        chosen = await judge.ask(selection_question(query, shown, seen, SIZE))
        if chosen is None:
            chosen = [name for name in names if name[0] == "A"]
        kept = (anchor for name, anchor in zip(names, ladder.anchors, strict=True) if name in chosen)
        return replace(
            ladder,
            anchors=tuple(replace(a, source="selected") if a.source == "candidate" else a for a in kept),
        )

    def first_questions(self, group: RolloutGroup) -> list[Question]:
        """See [`RewardMethod`]."""
        anchors = [anchor.text for anchor in initial_buffer(group.query.responses, SIZE).anchors]
        return [insertion_question(group.query, anchors, rollout.text) for rollout in group.answered]

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """See [`RewardMethod`]."""
        n = len(group.answered)
        if self.look_ahead:
            return n, n + n // 2 + (n > 0 and not first)
        return n + (n > 0), n + n // 2 + (n > 0)


def ladder(buffer: AnchorBuffer, ranking: Ranking, group: RolloutGroup) -> AnchorBuffer:
    """Anchors and ranked rollouts in their established order, worst to best.

    Rollouts of an interval that nobody could rank stand in the order in which they were sampled.
    """
    rungs: list[Anchor] = []
    for p, rollouts in enumerate(ranking.sigma):
        rungs += [Anchor(f"{group.step}-{r.id}", r.text, "candidate", group.known_epoch) for r in rollouts]
        rungs += buffer.anchors[p : p + 1]
    return replace(buffer, anchors=tuple(rungs))


METHOD = LLMBuffer
