"""Simulate judges, audit each of them, and measure what the advice is worth.

    python benchmarks/advice_trials.py --judges 40

Each trial draws a judge, audits it on 50 queries and asks for advice at four budgets. A budget is a share of the tokens
of RRC-SCR. The answers are compared with what each method does under this judge: on 1,000 other groups, whose quality
only the simulation knows. The script prints tables and then one JSON line.

**The judges.** A look is quality, plus a lasting error of the response, plus place bias, plus fresh noise. The unit of
quality is its deviation within a typical group. The deviation of a group is log-normal (0.4) over groups. A judge errs
by 0.12 to 1.2 in a pair. Up to 90 % of the variance of this error is lasting. In a list of 8 the fresh noise is `crowd`
times as large. Place bias goes up to 2, and it varies from query to query by 30 % of its size. Blocks of judges:

* `crowd 1-2`, `crowd 1-4`: the range of `crowd`.
* `bias of lists`: crowd 1 to 2. Place bias in lists is 0.5 to 4 times as large as in pairs.
* `heavy tails`: crowd 1 to 2. The noise follows Student's t with 3 degrees of freedom.
* `lasting grows`: crowd 1 to 4. The lasting error grows with `crowd`, too, so lists and pairs settle on other opinions.
* `own lasting`: crowd 1 to 2. Lists or pairs have a lasting error of their own, up to 1.5 times the whole error.

The two last blocks violate what the advice takes for granted. `kappa` is to notice it.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rankbuffer_trl.audit import advice
from rankbuffer_trl.audit.advice import LISTS, POINTWISE, MethodCosts, MethodRow, Taus, choose, predict, tabulate
from rankbuffer_trl.audit.expected import METHODS, Errors, G, Judged, draw, tau
from rankbuffer_trl.audit.fit import Fit, fit_judge
from rankbuffer_trl.audit.model import JudgeModel, QueryLooks

WANDER = 0.3  # standard deviation, over queries, of the place bias as a share of its mean
QUERIES, LISTS_ASKED, PAIRS_ASKED = 50, 4, 4
BUDGETS = (0.25, 0.45, 0.8, 1.05)
COSTS = MethodCosts(4000, in_list=(3600, 31), in_pair=(1220, 9), tokens_per_second=1000)  # docs/results/judge_cost.md
RRC_SCR = COSTS.groups * 28 * 1229
PAPER_RUN = 95.94e6  # RankBuffer's tokens in docs/results/judge_cost.md
LABELLED = 200


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw errors with heavy tails and the standard deviation 1."""
    return rng.standard_t(3, shape) / math.sqrt(3)


@dataclass(frozen=True)
class Simulated:
    """A judge: its model, and how its settled opinions come from quality.

    Args:
        model (`JudgeModel`):
            The model, whose unit is the spread of the settled opinion.
        lasting, own (`tuple[float, float]`):
            The lasting errors that both kinds of question share, and those of their own, in lists and in pairs. Their
            unit is the spread of quality.
        errors (`Errors`):
            Draws fresh noise.
    """

    model: JudgeModel
    lasting: tuple[float, float]
    own: tuple[float, float]
    errors: Errors

    def opinions(self, shape: tuple[int, int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw quality, what lists settle on, and what pairs settle on."""
        quality, shared, *alone = rng.standard_normal((4, *shape))
        lists, pairs = (
            (quality + lasting * shared + own * other) / math.hypot(1, lasting, own)
            for lasting, own, other in zip(self.lasting, self.own, alone, strict=True)
        )
        return quality, lists, pairs

    def ratings(self, pairs: np.ndarray, spread: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Draw ratings from 0 to 10. Scale and level vary by query, as in `simulated_judge.py`."""
        level, scale = rng.normal(2, 1, spread.shape), 0.2 * rng.lognormal(0, 0.3, spread.shape)
        look = spread * pairs + self.model.pair_noise * self.errors(rng, pairs.shape)
        return np.round(10 / (1 + np.exp(-(level + scale * look))))


def random_judge(
    rng: np.random.Generator,
    crowd: tuple[float, float] = (1, 2),
    of_lists: tuple[float, float] = (1, 1),
    grows: bool = False,
    own: float = 0.0,
    errors: Errors = np.random.Generator.standard_normal,
) -> Simulated:
    """Draw a judge of a block."""
    error, share = rng.uniform(0.12, 1.2), rng.uniform(0, 0.9)
    lasting, fresh = error * math.sqrt(share), error * math.sqrt(1 - share)
    factor, more = (math.exp(rng.uniform(*np.log(limits))) for limits in (crowd, of_lists))
    bias, middle = rng.uniform(-2, 2), rng.uniform(-1, 1)
    both = (lasting * factor if grows else lasting, lasting)
    alone = rng.permutation([rng.uniform(0, own) * error, 0.0]).tolist()
    in_list, in_pair = (math.hypot(1, *parts) for parts in zip(both, alone, strict=True))
    model = JudgeModel(
        list_noise=factor * fresh / in_list,
        list_bias=more * bias / in_list,
        list_middle=middle / in_list,
        pair_noise=fresh / in_pair,
        pair_bias=bias / in_pair,
        kappa=min((1 + both[0] * both[1]) / in_list / in_pair, 1.0),
        spread=0.4,
    )
    return Simulated(model, both, (alone[0], alone[1]), errors)


BLOCKS: dict[str, dict[str, Any]] = {
    "crowd 1-2": {},
    "crowd 1-4": {"crowd": (1, 4)},
    "bias of lists": {"of_lists": (0.5, 4)},
    "heavy tails": {"errors": heavy},
    "lasting grows": {"crowd": (1, 4), "grows": True},
    "own lasting": {"own": 1.5},
}


def audited(judge: Simulated, rng: np.random.Generator) -> tuple[list[QueryLooks], list[advice.Label]]:
    """Ask a judge the questions of an audit. Return its answers, and true labels of the pairs that were asked."""
    quality, *opinions = judge.opinions((QUERIES, G), rng)
    spread = np.exp(judge.model.spread * rng.standard_normal((QUERIES, 1)))
    ratings = judge.ratings(opinions[1], spread, rng)
    looks, labels = [], []
    for q in range(QUERIES):
        shuffled, partners = rng.permutation(G), rng.permutation(G)
        turned = np.roll(shuffled, G // 2)
        shown = [shuffled, shuffled[::-1], turned, turned[::-1]]
        shown += [partners[2 * k : 2 * k + 2][::step] for k in range(PAIRS_ASKED) for step in (1, -1)]
        direction, answers = 1 + WANDER * rng.standard_normal(), []
        for ids in shown:
            n = len(ids)
            gains = direction * np.array([judge.model.gain(slot, n) for slot in range(n)])
            opinion = (spread * opinions[n == 2])[q, ids]
            order = ids[np.argsort(opinion + gains + judge.model.noise(n) * judge.errors(rng, (n,)))]
            answers.append((tuple(ids.tolist()), tuple(order.tolist())))
        pairs = [(ids, order[1]) for ids, order in answers[LISTS_ASKED:]]
        looks.append(QueryLooks(f"query {q}", answers[:LISTS_ASKED], pairs, ratings[q].tolist()))
        labels += [(f"query {q}", *sorted(ids, key=lambda i: -quality[q, i])) for ids, _ in pairs[::2]]
    return looks, labels[:LABELLED]


def true_taus(judge: Simulated, groups: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return the tau of each method with the judge's settled opinion, and with quality."""
    rng, sample = np.random.default_rng(seed), draw(groups, seed, judge.errors)
    quality, lists, pairs = judge.opinions((groups, G), rng)
    own = (pairs - judge.model.kappa * lists) / math.sqrt(max(1 - judge.model.kappa**2, 1e-12))
    direction = 1 + WANDER * rng.standard_normal((groups, 1))
    judged = Judged(judge.model, replace(sample, lists=lists, own=own, direction=direction))
    taus = {}
    for recipe, method in METHODS.items():
        rewards = method(judged)
        taus[recipe] = judged.tau(rewards), float(tau(rewards.places, quality).mean())
    rated = judge.ratings(pairs, judged.spread, rng)
    taus[POINTWISE] = float(tau(rated, lists).mean()), float(tau(rated, quality).mean())
    return taus


@dataclass(frozen=True)
class Trial:
    """An audit of a judge, and what is true of the judge."""

    block: str
    judge: Simulated
    fit: Fit
    looks: Sequence[QueryLooks]
    labels: Sequence[advice.Label]
    taus: Taus
    tables: Sequence[Sequence[MethodRow]]
    true: dict[str, tuple[float, float]]

    def regret(self, recipe: str | None, budget: int) -> float:
        """Return what a recipe loses against the best one that fits, in % of its tau with quality."""
        fitting = {row.recipe: self.true[row.recipe][1] for row in self.tables[budget] if row.fits}
        return 100 * (1 - fitting[recipe] / max(fitting.values())) if recipe in fitting else math.nan

    def chosen(self, budget: int, labelled: bool = False) -> tuple[str | None, str | None]:
        """Return the recipe of the rule and the advised one."""
        labels = self.labels if labelled else ()
        return choose(self.tables[budget], self.taus, self.fit, self.looks, labels)[:2]


def run_trial(task: tuple[str, int, int, int]) -> Trial:
    """Audit one judge."""
    block, seed, draws, groups = task
    rng = np.random.default_rng([seed, list(BLOCKS).index(block)])
    judge = random_judge(rng, **BLOCKS[block])
    looks, labels = audited(judge, rng)
    fit = fit_judge(looks)
    fit = Fit(fit.model, fit.draws[:draws])
    taus, rewards = predict(fit, looks)
    tables = [tabulate(taus, rewards, COSTS, share * RRC_SCR) for share in BUDGETS]
    return Trial(block, judge, fit, looks, labels, taus, tables, true_taus(judge, groups, seed=1))
