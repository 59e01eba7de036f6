"""Debias the rewards of a cheap judge by a reference judge, which shows what the judge prefers without reason. Ours.

The reference judge is a second judge, and a better one. It scores the first `reference_groups` groups again as the
run's method does, so its rewards have the scale of the judge's. It reads no later ones: a policy that has learnt the
judge's bias writes alike in all rollouts, and what no longer differs cannot be told. A regression explains the
difference of the two by what an answer looks like: its words, its probes and its place in the group. All count less
their mean in the group, because a rank says nothing across groups. What the regression predicts for a rollout is
subtracted from its reward.

The reads stand in the store, and the correction of a step follows from those of all steps before. So a resumed run
corrects as the run would have.

Buffers keep the judge's order.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from .buffer import AnchorBuffer
from .groups import Rollout, RolloutGroup
from .judge import Judge
from .monitoring._probes import probe
from .rewards._method import GroupScore, RewardMethod
from .stems import WORD
from .store import history
from .store.history import Readable, ReadRow

logger = logging.getLogger(__name__)

WORD_IS = "the word "
PLACE = "place"  # of a rollout in its group
MAX_FEATURES = 8  # features that a correction has at most
MAX_CANDIDATES = 2000  # features that a correction looks at: those that differ in the most groups
NEWEST = 2000  # reads that a correction is made from, so that it fits into memory
MIN_READS = 6  # reads without which there is no correction
MIN_GROUPS = 3  # groups in which a feature must differ, so that it is not the subject of one query


def features_in(group: RolloutGroup, rollout: Rollout) -> dict[str, float]:
    """Return the features of an answer: its words, its probes, and its place in the group."""
    words = (WORD_IS + word for word in WORD.findall(rollout.text.lower()))
    probes = probe(rollout.text, group.query.rubrics)
    del probes["commonest_word"]  # that of short answers is their length
    return dict.fromkeys(words, 1.0) | probes | {PLACE: float(rollout.id)}


class Correction:
    """Regression of the difference between two readings on a few features, within groups.

    Their effects are not shrunk: ridge regression spread what a word adds over all words.

    Args:
        read (`Sequence[ReadRow]`):
            The answers that both have read.
    """

    def __init__(self, read: Sequence[ReadRow]):
        by_group: dict[tuple, list[ReadRow]] = defaultdict(list)
        for answer in read:
            by_group[answer.step, answer.query_id].append(answer)
        differing: Counter[str] = Counter()  # in how many groups
        first, differences, numbers = [], [], []
        for number, group in enumerate(by_group.values()):
            alike: dict[frozenset, list[ReadRow]] = defaultdict(list)
            for answer in group:
                # Equal answers of a group count as one.
                alike[frozenset(item for item in answer.features.items() if item[0] != PLACE)].append(answer)
            own = [rows[0].features for rows in alike.values()]
            shared = set(own[0].items()).intersection(*(features.items() for features in own))
            differing.update({name for features in own for name, _ in features.items() - shared})
            first += own
            differences += [fmean(answer.difference for answer in rows) for rows in alike.values()]
            numbers += [number] * len(alike)
        # Before there is a matrix, since nearly all words of long answers are in one group alone.
        enough = [name for name, count in differing.items() if count >= MIN_GROUPS]
        names = sorted(sorted(enough, key=lambda name: (-differing[name], name))[:MAX_CANDIDATES])
        columns, groups = {name: i for i, name in enumerate(names)}, np.array(numbers)
        X = np.zeros((len(first), len(names)))
        for row, features in zip(X, first, strict=True):
            for name in features.keys() & columns.keys():
                row[columns[name]] = features[name]
        X, y = within(X, groups), within(np.array(differences), groups)
        size = X.std(0)
        X = X / size
        # A feature must explain more than the best of so many would by chance. Twice the log would be RIC (Foster and
        # George 1994).
        free, chance = len(y) - groups.max() - 1, 3 * np.log(max(len(names), 2))
        selected: list[int] = []
        effects, residual = np.zeros(0), y
        while len(selected) < min(MAX_FEATURES, free // 4, len(names)) and np.abs(X.T @ residual).max() > 1e-9:
            candidate = [*selected, int(np.abs(X.T @ residual).argmax())]
            fitted = np.linalg.lstsq(X[:, candidate], y, rcond=None)[0]
            next_residual = y - X[:, candidate] @ fitted
            if free * np.log((residual @ residual) / max(next_residual @ next_residual, 1e-12)) < chance:
                break
            selected, effects, residual = candidate, fitted, next_residual
        by_effect = sorted(zip(selected, effects, strict=True), key=lambda pair: -abs(pair[1]))
        self.slopes = {names[i]: float(effect / size[i]) for i, effect in by_effect}
        self.effects = {names[i]: float(effect) for i, effect in by_effect}  # of one deviation of the feature

    def predict(self, features: Iterable[Mapping[str, float]]) -> np.ndarray:
        """Return what the judge adds to each answer without reason, up to a constant."""
        return np.array([sum(slope * each.get(n, 0.0) for n, slope in self.slopes.items()) for each in features])

    @property
    def named(self) -> str | None:
        """The feature with the largest effect; `None` if no feature has one."""
        return next(iter(self.effects), None)


def within(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return values, or rows of values, less their mean in each group."""
    sums = np.zeros((groups.max() + 1, *values.shape[1:]))
    np.add.at(sums, groups, values)
    count = np.bincount(groups).reshape(-1, *[1] * (values.ndim - 1))
    return values - (sums / count)[groups]


class Debiasing:
    """The reference judge of a run, and the corrections that follow from what it has read.

    Args:
        first (`int`):
            So many groups of the run are all read, and none of the later ones.
    """

    def __init__(self, reference_judge: Judge, first: int):
        self.reference_judge = reference_judge
        self.first = first
        self._correction: tuple[Any, Correction | None] = None, None  # with what tells the reads that it was made from

    @property
    def named(self) -> str | None:
        """The feature with the largest bias, `None` if nothing is known."""
        return self._correction[1].named if self._correction[1] else None

    def chosen(self, before: int, groups: int) -> Sequence[int]:
        """Return which groups of a step the reference judge scores. `before` counts the groups of all steps before."""
        return range(min(self.first - before, groups))

    def warn_if_late(self, store: Readable) -> None:
        """Warn that a run is past the groups that the reference judge reads, and that it has read none of them."""
        if history.count_groups(store) >= self.first and not history.count_reads(store)[0]:
            logger.warning(
                f"the first {self.first} groups of this run had no reference judge, and it scores no later ones: raise"
                " reference_groups, or leave reference_judge out"
            )

    async def read(
        self, method: RewardMethod, group: RolloutGroup, buffer: AnchorBuffer | None, score: GroupScore
    ) -> list[ReadRow]:
        """Let the reference judge score a group. Return the rollouts that both judges have scored."""
        reference = await method.score(group, buffer, self.reference_judge)
        return [
            ReadRow(group.query.id, group.step, rollout.id, reward - reference_reward, features_in(group, rollout))
            for rollout, reward, reference_reward in zip(group.rollouts, score.rewards, reference.rewards, strict=True)
            if rollout.text and reward is not None and reference_reward is not None
        ]

    def correct(
        self, store: Readable, groups: Sequence[RolloutGroup], scores: Sequence[GroupScore]
    ) -> list[GroupScore]:
        """Return the scores less what the judge adds to them without reason, as the newest reads tell it."""
        reads_key = history.run_id(store), *history.count_reads(store)
        if reads_key != self._correction[0]:  # a correction takes time, and most steps have no new reads
            read = history.reads(store, NEWEST)
            correction = Correction(read) if len(read) >= MIN_READS else None
            self._correction = reads_key, correction
            for name, effect in correction.effects.items() if correction else ():
                line = f"judge bias: {effect:+.2f} of reward for one standard deviation of {name}"
                logger.info(f"{line}; the reference judge has scored {len(read)} rollouts")
        return [corrected(self._correction[1], *pair) for pair in zip(groups, scores, strict=True)]


def corrected(correction: Correction | None, group: RolloutGroup, score: GroupScore) -> GroupScore:
    """Return the score of a group less what a correction predicts."""
    scored = [rollout for rollout in group.answered if score.rewards[rollout.id] is not None]
    if correction is None or len(scored) < 2:
        return score
    added = correction.predict(features_in(group, rollout) for rollout in scored)
    rewards = list(score.rewards)
    # Less the mean, because a rank says nothing across groups.
    for rollout, bias in zip(scored, added - added.mean(), strict=True):
        rewards[rollout.id] = float(np.clip(rewards[rollout.id] - bias, -1, 1))  # rewards stay in [-1, 1]
    return replace(score, rewards=tuple(rewards))
