"""Simulate audits of judges whose errors are known, and measure how well the audit finds them.

    python benchmarks/audit_trials.py --trials 100

Each trial draws a judge, lets the audit ask it its questions, and compares the estimate with the truth. The judges are
those of the audit's own model, except that their place bias varies from query to query. The script prints one table
per number of queries and per spread of the groups, and then one JSON line.
"""

import math

import numpy as np

from rankbuffer_trl.audit.model import JudgeModel, QueryLooks

QUALITY = 0.25  # spread of quality within a typical group, the unit of `random_judge`'s ranges
WANDER = 0.3  # standard deviation, over queries, of the place bias as a share of its mean


def random_judge(
    rng: np.random.Generator, crowd: tuple[float, float] = (1, 2), spread: float = 0.4, bias: float = 0.5
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
            The largest place bias, in the unit of quality.
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
    wander: float = WANDER,
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
        wander (`float`, *optional*, defaults to `0.3`):
            Standard deviation, over queries, of the place bias as a share of its mean.
        missing (`float`, *optional*, defaults to `0.0`):
            Share of answers that are not valid.
    """
    _, queries, n = settled.shape
    gains = {size: np.array([model.gain(slot, size) for slot in range(size)]) for size in (2, n)}
    looks = []
    for q in range(queries):
        factor = 1 + wander * rng.standard_normal()
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
