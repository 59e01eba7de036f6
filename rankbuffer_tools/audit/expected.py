"""The expected tau of each method in a group of 8, under a model of the judge. This file is ours, not the paper's.

Everything is relative to the judge's settled opinion, so nothing here says how good a reward is. All methods and all
models of a judge see the same random groups and errors. So differences of two taus are known better than the taus.

RankBuffer gets anchors from the world of experiments/judge_cost, in the unit of a group's spread. The paper's
update makes them in the epochs 0 to 3, under a judge that never errs. `tests/test_advice.py` compares all methods with
the real ones.
"""

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from rankbuffer_trl.buffer import initial_buffer
from rankbuffer_trl.groups import Rollout

from .model import JudgeModel

G = 8
IDS = np.arange(G)
LEFT, RIGHT = np.triu_indices(G, 1)
START, APART, REFERENCES, DRIFT = 4.8, 4.0, 4.0, 2.0  # of rollouts and references, relative to a group's spread
Errors = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


@dataclass(frozen=True)
class Sample:
    """Random groups and the errors of all looks at them, each of size 1, for `M` groups.

    Args:
        lists, own (`np.ndarray`):
            Settled opinion behind lists, and the part of the opinion behind pairs that lists do not share; (M, 8).
        width (`np.ndarray`):
            Standard normal numbers that decide the spread of a group; (M, 1).
        direction (`np.ndarray`):
            Standard normal numbers that decide the factor of all place gains of a group; (M, 1).
        looks (`np.ndarray`):
            Errors of six lists; (6, M, 8).
        anchors (`np.ndarray`):
            Places of the anchors relative to a group, infinite where there are none; (M, K).
        coarse (`np.ndarray`):
            Errors at candidate and anchors of each insertion; (M, 8, K + 1).
        pairs (`np.ndarray`):
            Errors at both rollouts of a pair, by the one shown first and the one shown second; (2, M, 8, 8). If a
            question is repeated, its errors are the same.
        swapped (`np.ndarray`):
            Whether the second rollout of a pair is shown first; (M, 28).
        cups, turned (`np.ndarray`):
            The brackets of three tournaments, and whether the second one of a match is shown first; (3, M, 8) and
            (3, M, 7).
    """

    lists: np.ndarray
    own: np.ndarray
    width: np.ndarray
    direction: np.ndarray
    looks: np.ndarray
    anchors: np.ndarray
    coarse: np.ndarray
    pairs: np.ndarray
    swapped: np.ndarray
    cups: np.ndarray
    turned: np.ndarray


@lru_cache(maxsize=4)
def draw(groups: int = 400, seed: int = 0, errors: Errors = np.random.Generator.standard_normal) -> Sample:
    """Draw groups of 8 and errors of the judge.

    Args:
        groups (`int`, *optional*, defaults to `400`):
            The number of groups.
        seed (`int`, *optional*, defaults to `0`):
            The seed.
        errors (`Errors`, *optional*):
            Draws errors with the standard deviation 1 in a given shape. They are normal by default.
    """
    rng = np.random.default_rng(seed)
    lists = rng.standard_normal((groups, G))
    anchors = anchors_of(groups, rng)
    return Sample(
        lists=lists,
        own=rng.standard_normal((groups, G)),
        width=rng.standard_normal((groups, 1)),
        anchors=anchors,
        looks=errors(rng, (10, groups, G))[:6],  # the last four were those of another method: pages print these draws
        coarse=errors(rng, (groups, G, anchors.shape[1] + 1)),
        pairs=errors(rng, (2, groups, G, G)),
        swapped=rng.random((groups, len(LEFT))) < 0.5,
        cups=rng.permuted(np.tile(IDS, (3, groups, 1)), axis=2),
        turned=rng.random((3, groups, G - 1)) < 0.5,
        direction=rng.standard_normal((groups, 1)),
    )


def anchors_of(groups: int, rng: np.random.Generator) -> np.ndarray:
    """Return the places of the anchors that each group is inserted among, relative to the group's mean."""
    found = []
    for number in range(groups):
        mean, epochs = rng.normal(START, APART), number % 4
        values = [rng.standard_normal(G) + mean + epoch * DRIFT for epoch in range(epochs)]
        buffer = initial_buffer([repr(float(value)) for value in sorted(rng.normal(0, REFERENCES, 7))], 4)
        for epoch, group in enumerate(values):
            places = [float(anchor.text) for anchor in buffer.anchors]
            sigma: list[list[Rollout]] = [[] for _ in range(len(places) + 1)]
            for i, value in enumerate(sorted(group)):
                sigma[bisect(places, value)].append(Rollout(i, repr(float(value))))
            buffer = buffer.update(sigma, epoch, epoch)
        found.append([float(anchor.text) - mean - epochs * DRIFT for anchor in buffer.anchors])
    return np.array([places + [np.inf] * (max(map(len, found)) - len(places)) for places in found])


@dataclass(frozen=True)
class Rewards:
    """The places of rollouts from which a method takes its rewards, and the mean cost of a group.

    Args:
        places (`np.ndarray`):
            Place of each rollout in its group; the higher, the better; (M, 8).
        prompts, responses (`float`):
            Prompts, and responses shown in all of them, per group.
        pairs (`bool`, *optional*, defaults to `False`):
            Whether the method asks about pairs.
    """

    places: np.ndarray
    prompts: float
    responses: float
    pairs: bool = False


class Judged:
    """The looks of a judge at the groups of a sample."""

    def __init__(self, model: JudgeModel, sample: Sample):
        self.model, self.sample = model, sample
        self.spread = np.exp(model.spread * sample.width)
        self.factor = 1 + model.bias_spread * sample.direction
        self.lists = self.spread * sample.lists
        self.pairs = self.spread * (model.kappa * sample.lists + np.sqrt(1 - model.kappa**2) * sample.own)
        self.anchors = self.spread * sample.anchors
        self.K = np.isfinite(sample.anchors).sum(1, keepdims=True)
        # No audit shows more than 8 responses in a prompt. Noise is not believed to fall beyond.
        shown = range(G + sample.anchors.shape[1] + 2)
        self.noise = np.array([max(model.noise(n), model.list_noise if n > G else 0) for n in shown])

    def gain(self, slot: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Return what a slot gains, as [`JudgeModel.gain`] says."""
        share = slot / np.maximum(n - 1, 1)
        longer = self.model.list_bias * (0.5 - share) + self.model.list_middle * (np.abs(2 * share - 1) - 1)
        return self.factor * np.where(n == 2, self.model.pair_bias * (0.5 - share), longer)

    def look(self, errors: np.ndarray, slot: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Return the looks at all rollouts, each at its slot in a prompt with `n` responses."""
        return self.lists + self.gain(slot, n) + self.noise[n] * errors

    def match(self, a: np.ndarray, b: np.ndarray, swapped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the winners and the losers of matches of `a` with `b`. Where `swapped`, the one of `b` is first."""
        first, second = np.where(swapped, b, a), np.where(swapped, a, b)
        group = np.arange(len(self.pairs))[:, None]
        errors = self.model.pair_noise * self.sample.pairs[:, group, first, second]
        apart = self.pairs[group, first] - self.pairs[group, second] + errors[0] - errors[1]
        won = apart + self.factor * self.model.pair_bias > 0
        return np.where(won, first, second), np.where(won, second, first)

    def tau(self, rewards: Rewards) -> float:
        """Return the mean tau-b of rewards with what the judge settles on, in lists or in pairs."""
        return float(tau(rewards.places, self.pairs if rewards.pairs else self.lists).mean())


def above(looks: np.ndarray) -> np.ndarray:
    """Return 1 where the first rollout of a pair is above the second; (M, 8, 8)."""
    return (looks[:, :, None] > looks[:, None, :]).astype(float)


def slot(look: int, place: np.ndarray, n: np.ndarray | int) -> np.ndarray:
    """Return the slot at which `looks.balanced` shows the rollout with this place in the shuffle."""
    place = (place - n // 2) % n if look % 4 >= 2 else place
    return n - 1 - place if look % 2 else place


def listwise(judged: Judged, looks: int, again: bool = False) -> Rewards:
    """Rank the group in balanced orders and, with `again`, twice more the blocks in dispute."""
    errors = judged.sample.looks
    heard = [judged.look(errors[look], slot(look, IDS, G), np.array(G)) for look in range(looks)]
    share = np.mean([above(one) for one in heard], axis=0)
    if not again:
        return Rewards(share.sum(2), looks, looks * G)
    order = np.argsort(heard[0], 1)
    places = np.take_along_axis(np.argsort(np.argsort(heard[1], 1), 1), order, 1)
    ends = np.maximum.accumulate(places, 1) == IDS  # here both looks have the same rollouts below
    block = np.empty_like(order)
    np.put_along_axis(block, order, np.cumsum(ends, 1) - ends, 1)
    twice, prompts, responses = blockwise(judged, block, (2, 3))
    share = np.where(block[:, :, None] == block[:, None, :], (share + twice) / 2, share)
    return Rewards(share.sum(2), looks + prompts, looks * G + responses)


def blockwise(judged: Judged, block: np.ndarray, looks: Iterable[int]) -> tuple[np.ndarray, float, float]:
    """Rank each block alone. Return the mean of [`above`], which counts inside blocks, and the cost of a group."""
    same = block[:, :, None] == block[:, None, :]
    n = same.sum(2)
    place = (same & (IDS[:, None] > IDS)).sum(2)
    heard = [above(judged.look(judged.sample.looks[look], slot(look, place, n), n)) for look in looks]
    asked = n > 1
    times = len(heard)
    return np.mean(heard, axis=0), times * float((asked / n).sum(1).mean()), times * float(asked.sum(1).mean())


def rankbuffer(judged: Judged, looks: int) -> Rewards:
    """Insert each rollout among the anchors, and rank those of one interval."""
    K, errors = judged.K, judged.sample.coarse
    noise = judged.noise[K + 1]
    slots = np.arange(judged.anchors.shape[1])
    marks = judged.anchors + judged.gain(np.minimum(slots, K), K + 1)
    seen = judged.lists + judged.gain(K, K + 1) + noise * errors[:, :, 0]
    position = (marks[:, None, :] + noise[:, :, None] * errors[:, :, 1:] < seen[:, :, None]).sum(2)
    share, prompts, responses = blockwise(judged, position, range(looks))
    share = np.where(position[:, :, None] == position[:, None, :], share, above(position))
    return Rewards(share.sum(2), G + prompts, G * float(K.mean() + 1) + responses)


def rrc_scr(judged: Judged) -> Rewards:
    """Compare every two rollouts once, in a random order."""
    won, _ = judged.match(LEFT, RIGHT, judged.sample.swapped)
    wins = (won[:, :, None] == IDS).sum(1)
    return Rewards(wins, len(LEFT), 2 * len(LEFT), pairs=True)


def tournament(judged: Judged) -> Rewards:
    """Play three knockout tournaments, and count the matches won."""
    points = np.zeros_like(judged.lists)
    for left, turned in zip(judged.sample.cups, judged.sample.turned, strict=True):
        while left.shape[1] > 1:
            half = left.shape[1] // 2  # the rounds have 4, 2 and 1 matches: turned[:, 3:7], [1:3] and [0:1]
            left, _ = judged.match(left[:, ::2], left[:, 1::2], turned[:, half - 1 : 2 * half - 1])
            points += (left[:, :, None] == IDS).sum(1)
    return Rewards(points, 3 * (G - 1), 6 * (G - 1), pairs=True)


METHODS: dict[str, Callable[[Judged], Rewards]] = {
    "beyond/listwise_one": partial(listwise, looks=1),
    "beyond/listwise_two": partial(listwise, looks=2),
    "beyond/listwise": partial(listwise, looks=2, again=True),
    "paper/rankbuffer": partial(rankbuffer, looks=1),
    "paper/tournament_grpo": tournament,
    "paper/rrc_scr": rrc_scr,
}


def tau(places: np.ndarray, opinion: np.ndarray) -> np.ndarray:
    """Return Kendall's tau-b of each group; 0 where all rewards, or all opinions, are equal."""
    places = places.round(6)  # so that equal sums of thirds are equal
    ours, theirs = (np.sign(values[:, LEFT] - values[:, RIGHT]) for values in (places, opinion))
    untied = np.abs(ours).sum(1) * np.abs(theirs).sum(1)
    return (ours * theirs).sum(1) / np.sqrt(np.maximum(untied, 1))


def tied(places: np.ndarray) -> float:
    """Return the share of rollouts that share their reward with another one of their group."""
    places = places.round(6)
    return float(((places[:, :, None] == places[:, None, :]).sum(2) > 1).mean())


def expected_tau(model: JudgeModel, method: str, sample: Sample | None = None) -> float:
    """Return the mean tau-b, within a group of 8, of the rewards of a method with the judge's settled opinion.

    Args:
        model (`JudgeModel`):
            The judge. With `kappa` below 1, lists and pairs are each compared with their own settled opinion.
        method (`str`):
            A recipe: a key of `METHODS`.
        sample (`Sample`, *optional*):
            The groups and errors to use. Taus of the same sample can be compared.
    """
    judged = Judged(model, sample or draw())
    return judged.tau(METHODS[method](judged))
