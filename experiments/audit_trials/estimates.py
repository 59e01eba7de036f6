"""Simulate audits of judges whose errors are known, and measure how well the audit finds them.

    python -m experiments.audit_trials.estimates --trials 100

Each trial draws a judge, lets the audit ask it its questions, and compares the estimate with the truth. The judges are
those of the audit's own model. The script prints one table per number of queries and per spread of the groups, and
then one JSON line.

`rmse` is the root of the mean squared error of the estimate, and `covered` is the share of trials whose 95 % interval
holds the truth. Noises and their ratio `crowd` are compared by their logarithms, so 0.1 is about 10 %. `tau list` and
`tau pair` are Kendall's tau of one list of 8, and of one look at a pair, against what the judge settles on.
"""

import argparse
import json
import math
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.special import ndtr

from rankbuffer_tools.audit.fit import fit_judge
from rankbuffer_tools.audit.model import CROWD, JudgeModel, QueryLooks

QUALITY = 0.25  # spread of quality within a typical group, the unit of `random_judge`'s ranges


def random_judge(
    rng: np.random.Generator,
    crowd: tuple[float, float] = (1, 2),
    spread: float = 0.4,
    bias: float = 0.5,
    bias_spread: float = 0.3,
) -> JudgeModel:
    """Draw a judge.

    The judge errs by 0.03 to 0.3 in a pair, and up to 90 % of the variance of this error is lasting. In a list of 8,
    the error is `crowd` times as large, its lasting part included. So lists and pairs settle on almost the same.

    Args:
        rng (`np.random.Generator`):
            The source of random numbers.
        crowd (`tuple[float, float]`, *optional*, defaults to `(1, 2)`):
            Range of the factor by which a list of 8 is harder than a pair.
        spread (`float`, *optional*, defaults to `0.4`):
            Standard deviation of the logarithm of a group's spread.
        bias (`float`, *optional*, defaults to `0.5`):
            The largest position bias, in the unit of quality.
        bias_spread (`float`, *optional*, defaults to `0.3`):
            Standard deviation, over queries, of the factor that multiplies the position bias.
    """
    noise = rng.uniform(0.03, 0.3)
    lasting = rng.uniform(0, 0.9) * noise**2
    fresh = noise**2 - lasting
    factor = math.exp(rng.uniform(*np.log(crowd)))
    in_list = math.hypot(QUALITY, factor * math.sqrt(lasting))  # the spread of what lists settle on
    in_pair = math.hypot(QUALITY, math.sqrt(lasting))
    place, middle = rng.uniform(0, bias) * rng.choice((-1, 1)), rng.uniform(-bias, bias) / 2
    return JudgeModel(
        list_noise=factor * math.sqrt(fresh) / in_list,
        list_bias=place / in_list,
        list_middle=middle / in_list,
        pair_noise=math.sqrt(fresh) / in_pair,
        pair_bias=place / in_pair,
        kappa=(QUALITY**2 + factor * lasting) / (in_list * in_pair),
        spread=spread,
        bias_spread=bias_spread,
    )


def opinions(model: JudgeModel, queries: int, rng: np.random.Generator, n: int = 8) -> np.ndarray:
    """Draw what the judge settles on: an array of lists' and pairs' opinions, by query and response."""
    in_lists, own = rng.standard_normal((2, queries, n))
    in_pairs = model.kappa * in_lists + math.sqrt(1 - model.kappa**2) * own
    return np.exp(model.spread * rng.standard_normal((queries, 1))) * np.stack([in_lists, in_pairs])


def ask(
    model: JudgeModel,
    settled: np.ndarray,
    rng: np.random.Generator,
    lists: int = 4,
    pairs: int = 4,
    missing: float = 0.0,
) -> list[QueryLooks]:
    """Ask a judge the questions of an audit.

    Args:
        model (`JudgeModel`):
            The judge.
        settled (`np.ndarray`):
            What the judge settles on, from [`opinions`].
        rng (`np.random.Generator`):
            The source of random numbers.
        lists (`int`, *optional*, defaults to `4`):
            Lists per query. They are a shuffle, its reverse, the shuffle turned by half, and the reverse of that.
        pairs (`int`, *optional*, defaults to `4`):
            Pairs per query, at most half of the responses. No response is in two pairs. Each is shown in both orders.
        missing (`float`, *optional*, defaults to `0.0`):
            Share of answers that are not valid.
    """
    _, queries, n = settled.shape
    gains = {size: np.array([model.gain(slot, size) for slot in range(size)]) for size in (2, n)}
    looks = []
    for q in range(queries):
        factor = 1 + model.bias_spread * rng.standard_normal()
        shuffled, partners = rng.permutation(n), rng.permutation(n)
        turned = np.roll(shuffled, n // 2)
        shown = [shuffled, shuffled[::-1], turned, turned[::-1]][:lists]
        shown += [partners[2 * k : 2 * k + 2][::step] for k in range(pairs) for step in (1, -1)]
        answers = []
        for k, ids in enumerate(shown):
            opinion, size = settled[0 if k < lists else 1, q, ids], len(ids)
            look = opinion + factor * gains[size] + model.noise(size) * rng.standard_normal(size)
            order = tuple(ids[np.argsort(look)].tolist())
            answers.append((tuple(ids.tolist()), None if rng.random() < missing else order))
        looks.append(
            QueryLooks(
                query_id=f"query {q}",
                lists=answers[:lists],
                pairs=[(ids, order and order[1]) for ids, order in answers[lists:]],
            )
        )
    return looks


def tau_once(model: JudgeModel, n: int) -> float:
    """Return Kendall's tau of the order of one prompt with `n` responses against the settled opinion."""
    turns = np.linspace(-2.5, 2.5, 11)
    taus = [tau_of_query(model.at(1 + model.bias_spread * turn), n) for turn in turns]
    return float(np.average(taus, weights=np.exp(-(turns**2) / 2)))


def tau_of_query(model: JudgeModel, n: int) -> float:
    """Return the tau of [`tau_once`] over queries that multiply the place gains of `model` by 1."""
    log_spreads = np.linspace(-3, 3, 9)
    weight = np.exp(-(log_spreads**2) / 2)
    spread = math.sqrt(2) * np.exp(model.spread * log_spreads)
    z = np.linspace(0.05, 4.95, 50)  # the size of the difference of two opinions, in units of its spread
    gains = np.array([model.gain(slot, n) for slot in range(n)])
    shift = (gains[:, None] - gains)[~np.eye(n, dtype=bool)]
    agree = ndtr((spread[:, None, None] * z[:, None] + shift) / (math.sqrt(2) * model.noise(n))).mean(axis=2)
    by_spread = (agree * np.exp(-(z**2) / 2)).sum(axis=1) / np.exp(-(z**2) / 2).sum()
    return float(2 * (by_spread * weight).sum() / weight.sum() - 1)


MEASURES: dict[str, Callable[..., float]] = {
    "list noise (log)": lambda model: math.log(model.list_noise),
    "list bias": lambda model: model.list_bias,
    "list middle": lambda model: model.list_middle,
    "pair noise (log)": lambda model: math.log(model.pair_noise),
    "pair bias": lambda model: model.pair_bias,
    "crowd (log)": lambda model: math.log(model.crowd),
    "kappa": lambda model: model.kappa,
    "spread": lambda model: model.spread,
    "bias_spread (log)": lambda model: math.log(model.bias_spread),
    "tau list": lambda model: tau_once(model, CROWD),
    "tau pair": lambda model: tau_once(model, 2),
}


def estimator_trials(trials: int, queries: int, spread: float, seed: int) -> dict[str, dict[str, float]]:
    """Return the bias, the RMSE and the coverage of each measure over simulated audits."""
    errors: dict[str, list[float]] = {name: [] for name in MEASURES}
    covered: dict[str, list[bool]] = {name: [] for name in MEASURES}
    for trial in range(trials):
        rng = np.random.default_rng([seed, queries, trial])
        truth = random_judge(rng, spread=spread)
        fit = fit_judge(ask(truth, opinions(truth, queries, rng), rng))
        for name, measure in MEASURES.items():
            true = measure(truth)
            low, high = np.quantile([measure(draw) for draw in fit.draws], [0.025, 0.975])
            errors[name].append(measure(fit.model) - true)
            covered[name].append(bool(low <= true <= high))
    return {
        name: {
            "bias": round(float(np.mean(errors[name])), 4),
            "rmse": round(math.sqrt(np.mean(np.square(errors[name]))), 4),
            "covered": round(float(np.mean(covered[name])), 3),
        }
        for name in MEASURES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="simulated audits per table")
    parser.add_argument("--queries", type=int, nargs="+", default=[50], help="queries of an audit, one table each")
    parser.add_argument(
        "--spreads", type=float, nargs="+", default=[0.4, 0.0], help="spreads of groups, one table each"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of judges and verdicts")
    arguments = parser.parse_args()

    console, tables = Console(), []
    for queries in arguments.queries:
        for spread in arguments.spreads:
            start = time.process_time()
            rows = estimator_trials(arguments.trials, queries, spread, arguments.seed)
            seconds = (time.process_time() - start) / arguments.trials
            table = Table(title=f"{queries} queries, spread of groups {spread:g}, {seconds:.2f} CPU seconds per trial")
            for column in ("", "bias", "rmse", "covered"):
                table.add_column(column, justify="right" if column else "left")
            for name, row in rows.items():
                exact = name == "spread" and not spread  # an estimate of 0 is impossible, so it cannot be covered
                table.add_row(
                    name, *(f"{row[key]:.3f}" for key in ("bias", "rmse")), "-" if exact else f"{row['covered']:.2f}"
                )
            console.print(table)
            tables.append({"queries": queries, "spread": spread, "cpu_s": round(seconds, 3), "measures": rows})
    print(json.dumps({"benchmark": "audit_trials", "trials": arguments.trials, "estimator": tables}))


if __name__ == "__main__":
    main()
