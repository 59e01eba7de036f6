"""Duels between stored responses of the first and the last epoch, and a control of the judge's placements. Ours.

A duel needs no anchors: the judge sees two responses to one query, in both orders. Responses are drawn from all stored
rollouts. Rollouts that became anchors take part, because the share would be too high without them.
"""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev
from typing import Any

from rankbuffer_trl.data.queries import QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import Call, Judge, JudgeError, Question, insertion_question, pairwise_question
from rankbuffer_trl.judge.judge import explain
from rankbuffer_trl.judge.probabilities import Reading, lead
from rankbuffer_trl.monitoring.probes import sign
from rankbuffer_trl.monitoring.progress import LEAST_QUERIES, Comparison, Visit, Z, compare
from rankbuffer_trl.store import BufferStore, history
from rankbuffer_trl.store.history import GroupRow, ResponseRow


@dataclass(frozen=True)
class Insertion:
    """A first-epoch response to insert again, among the anchors that it was placed among."""

    row: GroupRow
    anchors: list[ResponseRow]
    response: ResponseRow

    @property
    def recorded(self) -> int:
        """The recorded insertion position."""
        return self.row.positions[self.response.id.rpartition("-")[2]]


@dataclass(frozen=True)
class Draw:
    """What is asked.

    Args:
        epochs (`tuple[int, int]`):
            The first and the last epoch of the run.
        duels (`Mapping[str, tuple]`):
            Query, response of the first epoch and response of the last epoch, by name.
        control (`Mapping[str, Insertion]`):
            What is inserted again, by name.
    """

    epochs: tuple[int, int]
    duels: Mapping[str, tuple[str, ResponseRow, ResponseRow]]
    control: Mapping[str, Insertion]


def draw(store: BufferStore, duels: int, control: int, seed: int) -> Draw:
    """Draw duels and insertions. A query has one duel, or more if there are more duels than queries.

    The last epoch is the newest one with at least half as many queries as the first one.

    Args:
        store (`BufferStore`):
            The store of the run.
        duels (`int`):
            Number of duels. There are fewer if the queries do not have as many different pairs.
        control (`int`):
            Number of insertions: two or more responses of each of the first queries drawn. There are none if the run's
            first visits were not placed by insertions among anchors that the judge saw.
        seed (`int`):
            The seed of the draw.

    Raises:
        [`SettingsError`]: if the run has a single epoch, or no query has answers in both epochs.
    """
    by_epoch: dict[int, dict[str, GroupRow]] = defaultdict(dict)
    for row in history.groups(store):
        by_epoch[row.epoch][row.query_id] = row
    first = min(by_epoch)
    last = max(epoch for epoch in by_epoch if 2 * len(by_epoch[epoch]) >= len(by_epoch[first]))
    if first == last:
        raise SettingsError(f"the run has only epoch {first} so far: duels need a first and a last epoch")
    rows = [by_epoch[first], by_epoch[last]]
    shared = [id for id in rows[0] if id in rows[1]]
    random_ = random.Random(seed)
    ids = random_.sample(shared, len(shared))
    answers: dict[str, list[list[ResponseRow]]] = {}
    initial: dict[str, list[ResponseRow]] = {}
    for id in ids:
        stored = history.responses(store, id)
        of_epochs = [[r for r in stored if r.step == by[id].step and not r.initial] for by in rows]
        if all(of_epochs):
            answers[id] = of_epochs
            initial[id] = sorted((r for r in stored if r.initial), key=lambda r: history.initial_number(r.id))
    if not answers:
        raise SettingsError(f"no query has answers in both epochs, {first} and {last}, so there is nothing to compare")
    chosen = {}
    for place, (id, of_epochs) in enumerate(answers.items()):
        count = duels // len(answers) + (place < duels % len(answers))
        pairs = list(product(*of_epochs))
        for one, other in random_.sample(pairs, min(count, len(pairs))):
            chosen[f"{id} {one.id} {other.id}"] = (id, one, other)
    again: dict[str, Insertion] = {}
    placed_by_insertion = history.has_calls(store, "insert")  # by a judge that saw the anchors' texts
    each = max(2, math.ceil(control / len(answers)))
    for id, (before, _) in answers.items() if placed_by_insertion else ():
        row = rows[0][id]
        placed = [r for r in before if r.id.rpartition("-")[2] in row.positions]
        if len(initial[id]) == row.k:
            for response in random_.sample(placed, min(each, len(placed), control - len(again))):
                again[f"{id} {response.id}"] = Insertion(row, initial[id], response)
    return Draw((first, last), chosen, again)


def duel_questions(
    duels: Mapping[str, tuple[str, ResponseRow, ResponseRow]],
    queries: QueryTable | Mapping[str, Query],
    probabilities: bool = False,
) -> dict[str, Question]:
    """Return two questions per duel by name. `forth` shows the second response as B, and `back` shows it as A."""
    asked = {}
    for name, (id, one, other) in duels.items():
        for order, a, b in (("forth", one, other), ("back", other, one)):
            question = pairwise_question(queries[id], a.text, b.text, tie=False)
            asked[f"{name} {order}"] = replace(question, soft=probabilities)
    return asked


def questions_of(
    drawn: Draw,
    queries: QueryTable | Mapping[str, Query],
    probabilities: bool = False,
) -> dict[str, Question]:
    """Return the questions by name: two per duel, and one per insertion, `again`."""
    asked = duel_questions(drawn.duels, queries, probabilities)
    for name, each in drawn.control.items():
        anchors = [anchor.text for anchor in each.anchors]
        asked[f"{name} again"] = insertion_question(queries[each.row.query_id], anchors, each.response.text)
    return asked


def read_answers(drawn: Draw, verdicts: Mapping[str, Any]) -> tuple[int, Comparison, Comparison]:
    """Return who won the duels, and whether repeated insertions agree with the recorded ones.

    A duel that the last epoch wins in both orders counts 1, one that it wins in one order counts 1/2. Duels and
    insertions without a verdict are left out.

    Returns:
        `tuple[int, Comparison, Comparison]`: the number of duels, the share that the last epoch won, and how often a
        repeated placement is above a recorded one, which should be 50 %.

    Raises:
        [`JudgeError`]: if no duel has a verdict.
    """
    points: dict[str, list[float]] = {}
    for name, (id, _, _) in drawn.duels.items():
        if (won := points_of(name, verdicts)) is not None:
            points.setdefault(id, []).append(won)
    if not points:
        raise JudgeError("no duel has a verdict in both orders: run the same command again to ask the open ones")
    by_query: dict[str, list[tuple[Insertion, int]]] = {}
    for name, each in drawn.control.items():
        if (position := verdicts.get(f"{name} again")) is not None:
            by_query.setdefault(each.row.query_id, []).append((each, position))
    pairs = [
        (visit_of(placed, [each.recorded for each, _ in placed]), visit_of(placed, [again for _, again in placed]))
        for placed in by_query.values()
    ]
    shares, control = [fmean(of_query) for of_query in points.values()], compare(pairs)
    if pairs and control.probability is None:
        few = f"of {len(pairs)} queries, fewer than {LEAST_QUERIES} have responses on both sides of an anchor"
        control = replace(control, reason=f"{few}: a higher --control inserts more")
    return sum(map(len, points.values())), share_of(shares), control


def points_of(name: str, verdicts: Mapping[str, Any]) -> float | None:
    """Return the share of the orders in which a duel's second response won, `None` without both verdicts.

    Verdicts with probabilities give 1 if the log odds of both orders together favour it, 1/2 if they favour neither.
    """
    forth, back = verdicts.get(f"{name} forth"), verdicts.get(f"{name} back")
    if forth is None or back is None:
        return None
    if isinstance(forth, Reading):
        return (1 + sign(lead(forth, back))) / 2
    return ((forth == "B") + (back == "A")) / 2


def visit_of(placed: list[tuple[Insertion, int]], positions: list[int]) -> Visit:
    """Return placements of responses to one query among the anchors of its first visit."""
    row, anchors = placed[0][0].row, placed[0][0].anchors
    above = {anchor.id: sum(position > k for position in positions) for k, anchor in enumerate(anchors)}
    return Visit(row.query_id, row.step, row.epoch, above, len(positions))


def share_of(values: list[float]) -> Comparison:
    """Return the mean of shares, one per query, with Wilson's 95 % interval.

    The interval is that of as many yes-or-no answers as have the standard error of these shares. If all shares are
    equal, it is that of one answer per query.
    """
    n, p = len(values), fmean(values)
    variance = stdev(values) ** 2 / n if n > 1 else 0.0
    size = p * (1 - p) / variance if variance else n
    middle = (p + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * math.sqrt(p * (1 - p) / size + (Z / (2 * size)) ** 2)
    return Comparison(n, p, max(middle - half, 0.0), min(middle + half, 1.0))


def check_failures(judge: Judge, failed: Sequence[Call], of: int, most: float) -> None:
    """Refuse a result of which too many judgments failed.

    Raises:
        [`JudgeError`]: if the share of failed judgments is above `most`.
    """
    if failed and len(failed) > most * of:
        raise JudgeError(
            f"the judge ({judge.client.name}) failed {len(failed)} of {of} judgments, more than"
            f" judge_max_failures={most:g} allows. {explain(failed[-1])} The answers so far are kept: run the same"
            " command again to ask the others"
        )
