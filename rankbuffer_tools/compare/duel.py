"""Duels: the judge sees two answers to one query, in both orders. Ours.

A duel needs no anchors. The answers of two epochs are drawn from all stored rollouts. Rollouts that became anchors
take part, because the share would be too high without them.
"""

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean, stdev
from typing import Any

from rankbuffer_trl.data import QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError, Question, Reading, lead, pairwise_question
from rankbuffer_trl.monitoring import probe, sign
from rankbuffer_trl.monitoring.progress import Comparison, Z
from rankbuffer_trl.store import BufferStore, history


@dataclass(frozen=True)
class Duels:
    """Pairs of answers to compare."""

    labels: Sequence[str]  # of both policies, or epochs
    pairs: Mapping[str, tuple[str, str, str]]  # by name: query, answer of the first, answer of the second
    sampled: Sequence[Mapping[str, float]] = field(default=({}, {}))  # what the sampling has measured of both


def measures_of(duels: Duels) -> dict[str, dict[str, float]]:
    """Return the means of what needs no judge, by label."""
    measures = {}
    for index, (label, sampled) in enumerate(zip(duels.labels, duels.sampled, strict=True), start=1):
        answers = [pair[index] for pair in duels.pairs.values()]
        probes, answered = [*map(probe, answers)], fmean(map(bool, answers))
        names = {"words": "words", "repeated_4_grams": "repeated", "commonest_word": "commonest_word"}
        means = {name: fmean(each[of] for each in probes) for name, of in names.items()}
        measures[label] = {**sampled, **means, "answered": answered}
    return measures


def duels_by_query(ids: Sequence[str], duels: int, random_: random.Random) -> dict[str, int]:
    """Return how many duels each query has."""
    share, remainder = divmod(duels, len(ids))  # more than one only if there are more duels than queries
    extra = {*random_.sample(ids, remainder)}
    return {id: share + (id in extra) for id in ids if share or id in extra}


def draw(store: BufferStore, duels: int, epochs: Sequence[int] | None, seed: int | None) -> tuple[list[int], Duels]:
    """Draw duels between stored answers of two epochs.

    Args:
        duels (`int`):
            Number of duels. There are fewer if the queries do not have as many different pairs.
        epochs (`Sequence[int]`, *optional*):
            The two epochs. Default: the first one, and the newest one with at least half as many queries.

    Raises:
        [`SettingsError`]: if the run has no such epochs, or no query has answers in both.
    """
    steps: dict[int, dict[str, int]] = defaultdict(dict)
    for row in history.groups(store):
        steps[row.epoch][row.query_id] = row.step
    first = min(steps)
    # The newest epoch may have just begun.
    chosen = epochs or [first, max(epoch for epoch in steps if 2 * len(steps[epoch]) >= len(steps[first]))]
    if chosen[0] == chosen[1]:
        raise SettingsError(f"the run has only epoch {first} so far: duels need a first and a last epoch")
    if unknown := [epoch for epoch in chosen if epoch not in steps]:
        raise SettingsError(f"epochs: the run has no epoch {unknown[0]}; it has {', '.join(map(str, sorted(steps)))}")
    answers: dict[str, list[list[history.ResponseRow]]] = {}
    for id in (id for id in steps[chosen[0]] if id in steps[chosen[1]]):
        # Not without those that became anchors: the share would be too high.
        stored = [row for row in history.responses(store, id) if not row.initial]
        of_epochs = [[row for row in stored if row.step == steps[epoch][id]] for epoch in chosen]
        if all(of_epochs):
            answers[id] = of_epochs
    if not answers:
        raise SettingsError(f"no query has answers in both epochs, {chosen[0]} and {chosen[1]}: nothing to compare")
    random_ = random.Random(seed)
    pairs = {}
    for id, count in duels_by_query(list(answers), duels, random_).items():
        every = list(product(*answers[id]))
        for one, other in random_.sample(every, min(count, len(every))):
            pairs[f"{id} {one.id} {other.id}"] = (id, one.text, other.text)
    return list(chosen), Duels([f"epoch {epoch}" for epoch in chosen], pairs)


def questions_of(
    duels: Duels, queries: QueryTable | Mapping[str, Query], soft: bool = False, no_rubrics: bool = False
) -> dict[str, Question]:
    """Return two questions per duel by name. `forth` shows the second answer as B, `back` as A."""
    questions = {}
    for name, (id, one, other) in duels.pairs.items():
        for order, pair in {"forth": (one, other), "back": (other, one)}.items():
            question = replace(pairwise_question(queries[id], *pair, tie=False), soft=soft)
            if no_rubrics:
                # The paper's prompt but for these words.
                text = question.template.replace("\n\nRUBRICS\n{WEIGHTED_RUBRICS}", "")
                question = replace(question, template=text.replace("query and weighted rubrics", "query"))
            questions[f"{name} {order}"] = question
    return questions


def duel_score(pairs: Mapping[str, Sequence[str]], verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how often the second policy wins. A duel needs both of its verdicts, and each query counts the same.

    `won` is by log odds if there are probabilities, else by the verdicts. `wins` has both.

    Raises:
        [`JudgeError`]: if no duel has both verdicts.
    """
    greedy = {name: each.value if isinstance(each, Reading) else each for name, each in verdicts.items()}
    shares: dict[str, dict[str, list[float]]] = {"verdicts": defaultdict(list), "log odds": defaultdict(list)}
    leads: dict[str, list[float]] = defaultdict(list)
    by_place = 0
    for name, (id, *_) in pairs.items():
        forth, back = (verdicts.get(f"{name} {order}") for order in ("forth", "back"))
        if forth is None or back is None:  # one order alone is decided by the place, too
            continue
        by_place += greedy[f"{name} forth"] == greedy[f"{name} back"]
        # 1 if it wins in both orders, 1/2 in one.
        shares["verdicts"][id].append(((greedy[f"{name} forth"] == "B") + (greedy[f"{name} back"] == "A")) / 2)
        if isinstance(forth, Reading):
            leads[id].append(lead(forth, back) / 2)  # the place cancels out
            shares["log odds"][id].append((1 + sign(leads[id][-1])) / 2)
    if not shares["verdicts"]:
        raise JudgeError("no duel has a verdict in both orders: run the same command again to ask the open ones")
    # Each query counts the same.
    wins = {how: share_of([fmean(each) for each in of.values()]) for how, of in shares.items() if of}
    return {
        "duels": sum(map(len, shares["verdicts"].values())),
        "won": list(wins.values())[-1],
        "wins": wins,
        "mean_log_odds": fmean(map(fmean, leads.values())) if leads else None,
        "by_place": by_place,  # duels in which the place that is shown first, or second, wins in both orders
        "first_shown_wins": fmean(verdict == "A" for verdict in greedy.values()),
    }


def share_of(values: list[float]) -> Comparison:
    """Return the mean of shares, one per query, with Wilson's 95 % interval."""
    n, p = len(values), fmean(values)
    variance = stdev(values) ** 2 / n if n > 1 else 0.0  # 0 if all shares are equal: then one answer a query
    size = p * (1 - p) / variance if variance else n  # as many yes-or-no answers as have this standard error
    middle = (p + Z**2 / (2 * size)) / (1 + Z**2 / size)
    half = Z / (1 + Z**2 / size) * math.sqrt(p * (1 - p) / size + (Z / (2 * size)) ** 2)
    return Comparison(n, p, max(middle - half, 0.0), min(middle + half, 1.0))
