"""Simulate judges, audit each of them, and measure what the advice is worth.

    python -m experiments.audit_trials.advice --judges 34

Each trial draws a judge, audits it on 50 queries and asks for advice at four budgets. A budget is a share of RRC-SCR's
tokens. The answers are compared with what each method does under this judge, on other groups. The script prints tables
and then one JSON line.

**The judges.** A look is quality, plus a lasting error of the response, plus position bias, plus fresh noise. The unit
of quality is its deviation within a typical group. The deviation of a group is log-normal (0.4) over groups. A judge
errs by 0.12 to 1.2 in a pair. Up to 90 % of the variance of this error is lasting. In a list of 8 the fresh noise is
`crowd` times as large. Position bias goes up to 2, and it varies from query to query by 30 % of its size. There are
six blocks of judges:

* `crowd 1-2`, `crowd 1-4`: the range of `crowd`.
* `bias of lists`: crowd 1 to 2. Position bias in lists is 0.5 to 4 times as large as in pairs.
* `heavy tails`: crowd 1 to 2. The noise follows Student's t with 3 degrees of freedom.
* `own lasting`: crowd 1 to 2. Lists or pairs have a lasting error of their own, up to 1.5 times the whole error.
* `lasting grows`: crowd 1 to 4. The lasting error is also `crowd` times as large in a list of 8.

The two last blocks violate what the advice takes for granted. `kappa` is to notice it.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pool
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rankbuffer_tools.audit.advice import (
    ALARM,
    POINTWISE,
    MethodCosts,
    MethodRow,
    Taus,
    choose,
    predict,
    tabulate,
)
from rankbuffer_tools.audit.expected import METHODS, Errors, G, Judged, draw, tau
from rankbuffer_tools.audit.fit import Fit, Label, fit_judge, label_agreement
from rankbuffer_tools.audit.model import JudgeModel, QueryLooks

BIAS_SPREAD = 0.3  # standard deviation, over queries, of the position bias as a share of its mean
QUERIES, LISTS_ASKED, PAIRS_ASKED = 50, 4, 4
BUDGETS = (0.25, 0.45, 0.8, 1.05)
COSTS = MethodCosts(4000, in_list=(3600, 31), in_pair=(1220, 9), tokens_per_second=1000)  # of experiments/judge_cost
RRC_SCR = COSTS.groups * 28 * 1229
PAPER_RUN = 95.94e6  # RankBuffer's tokens in experiments/judge_cost
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
        bias_spread=BIAS_SPREAD,
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


OF_MODEL = ("crowd 1-2", "crowd 1-4", "bias of lists")


def audited(judge: Simulated, rng: np.random.Generator) -> tuple[list[QueryLooks], list[Label]]:
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
        factor, answers = 1 + judge.model.bias_spread * rng.standard_normal(), []
        for ids in shown:
            n = len(ids)
            gains = factor * np.array([judge.model.gain(slot, n) for slot in range(n)])
            opinion = (spread * opinions[n == 2])[q, ids]
            order = ids[np.argsort(opinion + gains + judge.model.noise(n) * judge.errors(rng, (n,)))]
            answers.append((tuple(ids.tolist()), tuple(order.tolist())))
        pairs = [(ids, order[1]) for ids, order in answers[LISTS_ASKED:]]
        looks.append(QueryLooks(f"query {q}", answers[:LISTS_ASKED], pairs, ratings[q].tolist()))
        labels += [(f"query {q}", *sorted(ids, key=lambda i: -quality[q, i])) for ids, _ in pairs[::2]]
    return looks, labels[:LABELLED]


def true_taus(judge: Simulated, groups: int, seed: int) -> dict[str, tuple[float, float]]:
    """Return the tau of each method with the judge's settled opinion, and with quality."""
    rng = np.random.default_rng([seed, 1])  # `draw` uses the numbers of `seed`
    sample = draw(groups, seed, judge.errors)
    quality, lists, pairs = judge.opinions((groups, G), rng)
    own = (pairs - judge.model.kappa * lists) / math.sqrt(max(1 - judge.model.kappa**2, 1e-12))
    judged = Judged(judge.model, replace(sample, lists=lists, own=own))
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
    taus: Taus
    tables: Sequence[Sequence[MethodRow]]
    true: dict[str, tuple[float, float]]
    shares: tuple[float, float] | None

    @property
    def alarm(self) -> bool:
        return self.fit.model.kappa < ALARM

    def picks(self, budget: int) -> dict[str, str | None]:
        """Return the recipe that each policy takes under a budget. Where the advice refuses, the rule is taken."""
        table = self.tables[budget]
        rule, advised, _ = choose(table, self.taus)
        _, with_alarm, _ = choose(table, self.taus, self.alarm)
        _, with_labels, _ = choose(table, self.taus, self.alarm, self.shares)
        return {
            "audit": with_alarm or rule,
            f"audit, {LABELLED} labels on an alarm": with_labels,
            "audit, no alarm": advised,
            "most looks that fit, no audit": rule,
            "always RankBuffer": "paper/rankbuffer",
            "always RRC-SCR": "paper/rrc_scr",
        }

    def regret(self, recipe: str | None, budget: int) -> float:
        """Return what a recipe loses against the best one that fits, in % of its tau with quality."""
        fitting = {row.recipe: self.true[row.recipe][1] for row in self.tables[budget] if row.fits}
        return 100 * (1 - fitting[recipe] / max(fitting.values())) if recipe in fitting else math.nan

    @property
    def costly(self) -> int:
        """The number of budgets at which the advice would lose more than 5 % without the alarm, by the wrong kind."""
        both = [b for b, table in enumerate(self.tables) if len({row.pairs for row in table if row.fits}) == 2]
        return sum(self.regret(self.picks(b)["audit, no alarm"], b) > 5 for b in both)


def run_trial(task: tuple[str, int, int, int]) -> Trial:
    """Audit one judge: a block, its number, the draws of the fit to use, and the groups that tell the truth."""
    block, number, draws, groups = task
    rng = np.random.default_rng([number, list(BLOCKS).index(block)])
    judge = random_judge(rng, **BLOCKS[block])
    looks, labels = audited(judge, rng)
    fit = fit_judge(looks)
    shares = tuple(share.value for share in label_agreement(fit, looks, labels)) if fit.model.kappa < ALARM else None
    fit = Fit(fit.model, fit.draws[:draws])
    taus, rewards = predict(fit, looks)
    tables = [tabulate(taus, rewards, COSTS, share * RRC_SCR) for share in BUDGETS]
    return Trial(block, judge, fit, taus, tables, true_taus(judge, groups, seed=1), shares)


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def predicted(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Return RMSE, bias and coverage of the predicted tau with the settled opinion, by method."""
    found = {}
    for recipe in trials[0].taus:
        errors = np.array([trial.taus[recipe][0] - trial.true[recipe][0] for trial in trials])
        ends = [np.quantile(trial.taus[recipe][1], [0.025, 0.975]) for trial in trials]
        covered = [low <= trial.true[recipe][0] <= high for (low, high), trial in zip(ends, trials, strict=True)]
        found[recipe] = {
            "rmse": round(float(np.sqrt(np.mean(errors**2))), 4),
            "bias": round(float(errors.mean()), 4),
            "covered": round(float(np.mean(covered)), 3),
        }
    return found


def regrets(trials: Sequence[Trial]) -> dict[str, list[dict[str, float] | None]]:
    """Return mean, worst and share within 3 % of the regret, by policy and budget."""
    found: dict[str, list[dict[str, float] | None]] = {}
    for policy in trials[0].picks(0):
        found[policy] = []
        for budget in range(len(BUDGETS)):
            lost = np.array([trial.regret(trial.picks(budget)[policy], budget) for trial in trials])
            lost = lost[~np.isnan(lost)]
            numbers = {"mean": lost.mean(), "worst": lost.max(), "within_3": (lost <= 3).mean()} if len(lost) else {}
            found[policy].append({key: round(float(value), 3) for key, value in numbers.items()} or None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judges", type=int, default=34, help="judges per block")
    parser.add_argument("--first", type=int, default=0, help="first judge; the thresholds come from 1000 on")
    parser.add_argument("--draws", type=int, default=120, help="draws of each fit that are used")
    parser.add_argument("--groups", type=int, default=2000, help="groups that tell what is true of a judge")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes to use")
    arguments = parser.parse_args()

    numbers = range(arguments.first, arguments.first + arguments.judges)
    tasks = [(block, number, arguments.draws, arguments.groups) for number in numbers for block in BLOCKS]
    with Pool(arguments.processes) as pool:
        trials = pool.map(run_trial, tasks, chunksize=1)
    console = Console(width=150)
    of_model = [trial for trial in trials if trial.block in OF_MODEL]

    tau_rows = predicted(of_model)
    rows = [
        [name, *(f"{row[key]:.3f}" for key in ("rmse", "bias")), f"{row['covered']:.2f}"]
        for name, row in tau_rows.items()
    ]
    print_table(console, f"Predicted tau, {len(of_model)} judges of the model", ["", "rmse", "bias", "covered"], rows)

    regret_rows = {block: regrets([trial for trial in trials if trial.block == block]) for block in BLOCKS}
    rows = [
        [block if number == 0 else "", policy]
        + [
            "-" if one is None else f"{one['mean']:.1f} / {one['worst']:.0f} / {one['within_3']:.2f}"
            for one in budgets
        ]
        for block, policies in regret_rows.items()
        for number, (policy, budgets) in enumerate(policies.items())
    ]
    title = "Regret in % of the best method's tau: mean / worst / share of judges within 3 %"
    print_table(console, title, ["judges", "policy", *(f"{budget:g}" for budget in BUDGETS)], rows)

    alarms = {}
    for block in BLOCKS:
        some = [trial for trial in trials if trial.block == block]
        costly = sum(trial.costly for trial in some)
        alarms[block] = {
            "alarms": sum(trial.alarm for trial in some) / len(some),
            "costly": costly,
            "caught": sum(trial.costly for trial in some if trial.alarm),
        }
    rows = [[block, f"{row['alarms']:.2f}", str(row["costly"]), str(row["caught"])] for block, row in alarms.items()]
    print_table(console, f"The alarm, at kappa below {ALARM:g}", ["judges", "alarms", "costly", "caught"], rows)

    prompts, responses = LISTS_ASKED + 2 * PAIRS_ASKED + G, G * LISTS_ASKED + 4 * PAIRS_ASKED + G  # with ratings
    tokens = QUERIES * sum(COSTS.run(prompts, responses)) / COSTS.groups
    console.print(
        f"The audit: {tokens / 1e6:.2f} M tokens, {tokens / PAPER_RUN:.1%} of RankBuffer's run in the paper."
    )
    found = {"predicted": tau_rows, "regret": regret_rows, "alarm": alarms, "audit_tokens": round(tokens)}
    print(json.dumps({"benchmark": "advice_trials", "judges": arguments.judges, "first": arguments.first, **found}))


if __name__ == "__main__":
    main()
