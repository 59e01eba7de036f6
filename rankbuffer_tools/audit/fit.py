"""Estimate the errors of a judge from its verdicts alone. The model and the estimator are ours, not the paper's.

**The model** ([`JudgeModel`]). In a group with spread `W`, the judge has a settled opinion of every response. It is
normal with standard deviation `W`, and `log W` is normal over groups with mean 0 and standard deviation `spread`. Each
time the judge reads a response, it sees this opinion, plus the gain of the slot, plus fresh noise. It then orders what
it has seen. A query multiplies all gains by its factor `F`, with mean 1 and standard deviation `bias_spread`. So if
`d` is the difference of two opinions, the judge of a list of `n` puts the first response above the second with
probability `Phi((d + F (gain(slot 1) - gain(slot 2))) / (sqrt(2) noise(n)))`. Pairs settle on an opinion of their own,
which has the correlation `kappa` with that of lists. Given `d`, the verdicts on a pair in both orders are therefore
signs of two correlated normal numbers:

    P(better, better | d, W, F) = Phi2((kappa d + F pair_bias) / s, (kappa d - F pair_bias) / s; v / s^2)
    v = 2 W^2 (1 - kappa^2),  s^2 = v + 2 pair_noise^2

**The estimate.** The lists of one query would need an integral over all opinions at once. A composite likelihood
takes responses by twos. All verdicts on two responses are independent given `d`, `W` and `F`, except for the two
above. Their probability is an integral over `d`, a sum over a fixed grid here. What two responses show about `W` and
`F` holds for the other responses of the group, too. So each two responses are taken together with each two others:

    log likelihood = sum of weight * log( sum over W, F of P(W, F) P(verdicts on i, j | W, F) P(those on k, l | W, F) )

over all disjoint `{i, j}` and `{k, l}` of a query. The weights make each two responses count once. Weak normal priors
(`CENTRE`, `WIDTH`) hold the numbers about which the verdicts say nothing, for example if no pair was asked.

**The intervals.** Terms of one query depend on each other, and queries do not. The covariance is therefore the
sandwich that is clustered by query, with a correction for few queries. `Fit.draws` come from Student's t with this
covariance. `kappa` cannot exceed 1, so a draw beyond 1 is moved to the most likely point with `kappa` 1. From few
queries, some draws would be absurd, so none goes further than 8 widths of the prior from its centre. If the judge is
so good or so bad that a parameter ends at its limit (`LOWEST`, `HIGHEST`), all draws have that limit.

Nothing here tells how much of the settled opinion is right. [`lasting_bound`] does, from labels that the user gives.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product

import numpy as np
from scipy.optimize import minimize
from scipy.special import ndtr, owens_t

from rankbuffer_trl.errors import RankBufferError

from .model import CROWD, JudgeModel, QueryLooks

DRAWS = 200
LABELS = 100  # the fewest labels that bound lasting error; fewer say next to nothing
Label = tuple[str, int, int]  # query, better response, worse response

# Differences of two opinions. The steps are small near 0, where verdicts change, and grow towards both ends.
STEPS = np.linspace(-5, 5, 72)
GRID, CELLS = 0.3 * np.sinh(STEPS), 0.3 * np.cosh(STEPS) * (STEPS[1] - STEPS[0])
NODES, CHANCES = np.polynomial.hermite_e.hermegauss(7)  # of log W / spread
SIDES = (-1, 1)  # F is 1 - bias_spread or 1 + bias_spread: two values have a mean and a standard deviation
CHANCES = np.tile(CHANCES / CHANCES.sum(), len(SIDES)) / len(SIDES)

# The parameters are log list_noise, list_bias, list_middle, log crowd, pair_bias, kappa, log spread, log bias_spread.
CENTRE = np.array([np.log(0.5), 0, 0, np.log(1.4), 0, 1, np.log(0.3), np.log(0.2)])
WIDTH = np.array([1, 1, 1, 0.5, 1, 0.3, 0.5, 0.7])
LOWEST = np.array([-3.5, -4, -4, -2, -4, -1, -4, -4])
HIGHEST = np.array([1.5, 4, 4, 3, 4, 1, 0, 0])
IS_KAPPA = np.arange(8) == 5


@dataclass(frozen=True)
class Fit:
    """What the verdicts of a judge say about its errors.

    Args:
        model (`JudgeModel`):
            The estimate.
        draws (`Sequence[JudgeModel]`):
            Models that the verdicts allow. The interval of any number that follows from a model lies between the
            quantiles 0.025 and 0.975 of that number over `draws`.
    """

    model: JudgeModel
    draws: Sequence[JudgeModel]


@dataclass(frozen=True)
class Estimate:
    """A number with the two ends of its 95 % interval."""

    value: float
    low: float
    high: float


def fit_judge(looks: Sequence[QueryLooks], seed: int = 0) -> Fit:
    """Estimate the errors of a judge, relative to its settled opinion.

    Failed verdicts are left out, and so is a repeated question about a pair. If all pairs or all lists are missing,
    the prior alone holds their parameters, and the draws of these are wide.

    Args:
        looks (`Sequence[QueryLooks]`):
            What the audit read, at best for 50 queries with 8 responses each. Fewer responses are allowed, from 3 on.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Raises:
        [`RankBufferError`]: if no verdict is valid.

    Example:

    ```python
    from .fit import fit_judge
    from .model import QueryLooks

    looks = [QueryLooks("q", [((0, 1, 2), (0, 2, 1)), ((2, 1, 0), (0, 1, 2))], [((0, 1), 1), ((1, 0), 1)])]
    fit_judge(looks).model.kappa  # one query says little, so this is close to its prior, 1
    ```
    """
    evidence = Evidence(looks)
    if not len(evidence.kinds):
        raise RankBufferError("the audit has no valid verdict, so it cannot estimate the judge's errors")

    def scores(theta: np.ndarray) -> np.ndarray:  # by query and parameter; kappa steps down because it ends at 1
        steps = np.where(IS_KAPPA, -1e-5, 1e-5)
        here = evidence.log_likelihood(_model(theta))
        ahead = [evidence.log_likelihood(_model(theta + step)) for step in np.diag(steps)]
        return (np.stack(ahead, axis=1) - here[:, None]) / steps

    def objective(theta: np.ndarray) -> float:
        return evidence.log_likelihood(_model(theta)).sum() - (((theta - CENTRE) / WIDTH) ** 2).sum() / 2

    def gradient(theta: np.ndarray) -> np.ndarray:
        return scores(theta).sum(axis=0) - (theta - CENTRE) / WIDTH**2

    Q = len(looks)
    starts = np.tile(CENTRE, (27, 1))  # from a start that is far off, the search may end in the wrong place
    starts[:, [0, 1, 4]] = list(product(np.log([0.15, 0.4, 1]), (-1, 0, 1), (-1, 0, 1)))
    starts[:, IS_KAPPA] = 0.9
    best = minimize(
        lambda theta: -objective(theta) / Q,
        max(starts, key=objective),
        jac=lambda theta: -gradient(theta) / Q,
        method="SLSQP",
        bounds=list(zip(LOWEST, HIGHEST, strict=True)),
    ).x
    draws = _draws(best, scores, gradient, Q, np.random.default_rng(seed))
    return Fit(_model(best), [_model(draw) for draw in draws])


def _draws(
    best: np.ndarray,
    scores: Callable[[np.ndarray], np.ndarray],
    gradient: Callable[[np.ndarray], np.ndarray],
    Q: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw parameters that the verdicts of `Q` queries allow, around the `best` ones."""
    # The curvature is taken just below kappa 1. One step of Newton leads from there to the best point without a limit
    # of kappa. A parameter at one of the other limits stays there.
    steps = np.where(IS_KAPPA, 0.005, 0.01)
    at = np.where(IS_KAPPA, np.minimum(best, 1 - steps), best)
    slopes = np.array([(gradient(at + step) - gradient(at - step)) / (2 * step.sum()) for step in np.diag(steps)])
    inner = np.flatnonzero((best > LOWEST + 1e-3) & (best < HIGHEST - 1e-3) | IS_KAPPA)
    block = np.ix_(inner, inner)
    inverse = np.zeros_like(slopes)
    inverse[block] = np.linalg.inv(-(slopes + slopes.T)[block] / 2)
    centre = at + inverse @ gradient(at)
    centre[IS_KAPPA] = np.maximum(centre, best)[IS_KAPPA]

    free = max(Q - len(at), 3)
    each = scores(at)
    covariance = inverse @ (each.T @ each * Q / free + np.diag(WIDTH**-2.0)) @ inverse
    normal = rng.multivariate_normal(np.zeros(len(at)), covariance, size=DRAWS)
    draws = centre + normal / np.sqrt(rng.chisquare(free, size=(DRAWS, 1)) / free)
    beyond = np.maximum(draws[:, IS_KAPPA] - 1, 0)
    draws = draws - beyond * inverse[IS_KAPPA] / inverse[IS_KAPPA, IS_KAPPA]
    return np.clip(draws, CENTRE - 8 * WIDTH, CENTRE + 8 * WIDTH)


def _model(theta: np.ndarray) -> JudgeModel:
    log_noise, list_bias, list_middle, log_crowd, pair_bias, kappa, *logs = theta.tolist()
    list_noise, pair_noise, spread, bias_spread = np.exp([log_noise, log_noise - log_crowd, *logs]).tolist()
    kappa = min(max(kappa, -1.0), 1.0)
    return JudgeModel(list_noise, list_bias, list_middle, pair_noise, pair_bias, kappa, spread, bias_spread)


def lasting_bound(fit: Fit, looks: Sequence[QueryLooks], labels: Sequence[Label], seed: int = 0) -> Estimate:
    """Bound, from labels, the share of the settled opinion's variance that is lasting error.

    The number is an upper bound, because the judge is blamed for errors of the labels as well. It is about what lists
    settle on, or about pairs if the audit asked for no list.

    Args:
        fit (`Fit`):
            What [`fit_judge`] found.
        looks (`Sequence[QueryLooks]`):
            The verdicts from which it was found.
        labels (`Sequence[tuple[str, int, int]]`):
            Query, better response and worse response, in truth. At least 100 of them.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap over queries.

    Raises:
        [`RankBufferError`]: if there are too few labels, or if one names a response that the audit does not know.
    """
    correlation = _truth(fit, looks, labels, pairs=not any(one.lists for one in looks), seed=seed)
    return _estimate(1 - np.maximum(correlation, 0) ** 2)


def label_agreement(
    fit: Fit, looks: Sequence[QueryLooks], labels: Sequence[Label], seed: int = 0
) -> tuple[Estimate, Estimate]:
    """Return the shares of labels with which the settled opinion of lists and that of pairs agree.

    These are the agreements after infinitely many looks: fresh noise and position bias are taken out. Arguments and
    errors are those of [`lasting_bound`]. Only labels count whose responses a list, or a pair, has compared.
    """
    lists, pairs = (
        _estimate(0.5 + np.arcsin(_truth(fit, looks, labels, pairs=pairs, seed=seed)) / np.pi)
        for pairs in (False, True)
    )
    return lists, pairs


def _estimate(values: np.ndarray) -> Estimate:
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def _truth(fit: Fit, looks: Sequence[QueryLooks], labels: Sequence[Label], pairs: bool, seed: int) -> np.ndarray:
    """Return the correlation of a settled opinion with truth: the estimate, and then its draws."""
    numbers = {one.query_id: q for q, one in enumerate(looks)}
    for query, *responses in labels:
        if query not in numbers or not all(0 <= i < looks[numbers[query]].n for i in responses):
            raise RankBufferError(f"a label is about responses {responses} of query {query!r}, which were not audited")
    asked = [replace(one, lists=()) if pairs else replace(one, pairs=()) for one in looks]
    told = [((numbers[query], min(two), max(two)), two[0] < two[1]) for query, *two in labels]
    evidence = Evidence(asked, only={two for two, _ in told})
    row = {two: k for k, two in enumerate(evidence.twos)}
    rows = np.array([row[two] for two, _ in told if two in row], dtype=np.intp)
    lower_wins = np.array([lower for two, lower in told if two in row], dtype=bool)[:, None]
    if len(rows) < LABELS:
        raise RankBufferError(
            f"{len(rows)} labels are about responses that the judge compared in {'pairs' if pairs else 'lists'}; a"
            f" statement about truth takes at least {LABELS}, so label {LABELS - len(rows)} more"
        )
    rng = np.random.default_rng(seed)
    _, owner = np.unique(np.array([two[0] for two in evidence.twos])[rows], return_inverse=True)
    candidates, found = np.sin(np.linspace(-1.5, 1.55, 62)), []
    for number, model in enumerate((fit.model, *fit.draws[:8])):
        model = replace(model, kappa=1.0)  # only verdicts of one kind are left
        agree = np.stack([evidence.chances(model, truth) @ CHANCES for truth in candidates], axis=1)[rows]
        plain = (evidence.chances(model) @ CHANCES)[rows, None]
        gains = np.log(np.maximum(np.where(lower_wins, agree, plain - agree) / plain, 1e-12))
        by_query = np.stack([np.bincount(owner, column) for column in gains.T], axis=1)
        Q = len(by_query)
        weights = rng.multinomial(Q, np.full(Q, 1 / Q), size=25) if number else np.ones((1, Q), dtype=np.int64)
        found += candidates[(weights @ by_query).argmax(axis=1)].tolist()
    return np.array(found)


def both_below(h: np.ndarray, k: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    """Return `Phi2(h, k; correlation)`: the probability that two correlated standard normals are below `h` and `k`."""
    h, k = (np.where(np.abs(x) < 1e-9, 1e-9, x) for x in (h, k))  # Owen's formula divides by both
    other = np.sqrt(1 - correlation**2)
    tails = owens_t(h, (k / h - correlation) / other) + owens_t(k, (h / k - correlation) / other)
    return (ndtr(h) + ndtr(k)) / 2 - tails - (h * k < 0) / 2


class Evidence:
    """The verdicts on each two responses of a query, and their likelihood.

    Args:
        looks (`Sequence[QueryLooks]`):
            What the audit read.
        only (`Collection[tuple[int, int, int]]`, *optional*):
            The number of a query and its two responses, the lower one first. All others are left out. By default, all
            are kept about which there is a verdict.
    """

    def __init__(self, looks: Sequence[QueryLooks], only: Collection[tuple[int, int, int]] | None = None) -> None:
        self.queries = len(looks)
        self.sizes = sorted({len(order) for one in looks for order in one.orders})
        ends = np.cumsum([0, *(2 * n * n for n in self.sizes)]).tolist()
        start = dict(zip(self.sizes, ends[:-1], strict=True))  # of each size of list in the table of `list_chances`
        self.twos: list[tuple[int, int, int]] = []
        rows, kinds = [], []
        for q, one in enumerate(looks):
            lists = [
                ({i: slot for slot, i in enumerate(shown)}, {i: place for place, i in enumerate(order)})
                for shown, order in one.lists
                if order
            ]
            pairs = {shown: better for shown, better in reversed(one.pairs) if better is not None}
            for i, j in combinations(range(one.n), 2):
                row = [
                    start[len(slot)] + 2 * (slot[i] * len(slot) + slot[j]) + (place[i] > place[j])
                    for slot, place in lists
                    if i in slot and j in slot
                ]
                # 0 for no verdict, 1 if i is better, 2 if j is better; first if i was shown first, then if j was
                first, second = (pairs.get(shown, -1) for shown in ((i, j), (j, i)))
                kind = 3 * ((first == i) + 2 * (first == j)) + (second == i) + 2 * (second == j)
                if (row or kind) and (only is None or (q, i, j) in only):
                    self.twos.append((q, i, j))
                    rows.append(row)
                    kinds.append(kind)
        longest = max(map(len, rows), default=0)
        self.rows = np.array([row + [ends[-1]] * (longest - len(row)) for row in rows], dtype=np.intp)
        self.kinds = np.array(kinds, dtype=np.intp)
        self.list_chances = lru_cache(maxsize=10)(self._list_chances)
        self._meet()

    def _meet(self) -> None:
        """Find the disjoint twos of each query, and the weight of their term."""
        together = [
            (a, b)
            for q in range(self.queries)
            for a, b in combinations([row for row, two in enumerate(self.twos) if two[0] == q], 2)
            if not {*self.twos[a][1:]} & {*self.twos[b][1:]}
        ]
        met = np.bincount(np.array(together, dtype=np.intp).ravel(), minlength=len(self.twos))
        alone = np.flatnonzero(met == 0)
        together += [(a, len(self.twos)) for a in alone.tolist()]  # the last row of `chances` is a 1
        self.left, self.right = np.array(together, dtype=np.intp).reshape(-1, 2).T
        shares = np.append(1 / np.maximum(met, 1), 1.0)
        self.weights = (shares[self.left] + np.where(self.right < len(met), shares[self.right], shares[self.left])) / 2
        self.of_query = np.array([q for q, _, _ in self.twos], dtype=np.intp)[self.left]

    def _list_chances(self, model: JudgeModel) -> np.ndarray:
        """Return the probability of all list verdicts on each two responses, given the difference in opinion."""
        tables = []
        for n in self.sizes:
            gains = np.array([model.gain(slot, n) for slot in range(n)])
            towards = np.array([-1, 1])[:, None] * (GRID + (gains[:, None] - gains)[..., None, None])
            tables.append(ndtr(towards / (np.sqrt(2) * model.noise(n))).reshape(-1, len(GRID)))
        table = np.concatenate([*tables, np.ones((1, len(GRID)))])  # the last row stands for no verdict
        chances = np.ones((len(self.rows), len(GRID)))
        for column in self.rows.T:
            chances *= table[column]
        return chances

    def chances(self, model: JudgeModel, truth: float | None = None) -> np.ndarray:
        """Return the probability of all verdicts on each two responses, given a query's factor and spread.

        Args:
            model (`JudgeModel`):
                The judge.
            truth (`float`, *optional*):
                Correlation of lists' opinion with truth. If it is given, the result is the probability of the
                verdicts and of the first response being better in truth.

        Returns:
            `np.ndarray`: shape `(len(twos) + 1, len(CHANCES))`: `NODES` for each of `SIDES`. The last row is 1.
        """
        return np.hstack([self._chances(model.at(1 + side * model.bias_spread), truth) for side in SIDES])

    def _chances(self, model: JudgeModel, truth: float | None) -> np.ndarray:
        """Return the columns of [`chances`] for one factor."""
        # A draw may have a spread at which a group lies between two points of the grid, or far beyond its ends.
        spreads = np.sqrt(2) * np.clip(np.exp(model.spread * NODES), 1e-3, 1e3)[:, None]
        density = np.exp(-((GRID / spreads) ** 2) / 2) * CELLS
        density /= density.sum(axis=1, keepdims=True)
        if truth is not None:
            density *= ndtr(truth * GRID / (spreads * np.sqrt(1 - truth**2)))
        own = (1 - model.kappa**2) * spreads**2
        variance = own + 2 * model.pair_noise**2
        h, k = ((model.kappa * GRID + gain) / np.sqrt(variance) for gain in (model.pair_bias, -model.pair_bias))
        one, two, both = ndtr(h), ndtr(k), both_below(h, k, own / variance)
        kinds = [1, two, 1 - two, one, both, one - both, 1 - one, two - both, 1 - one - two + both]
        neutral = model if self.sizes not in ([CROWD], []) else replace(model, pair_noise=1.0)
        lists = self.list_chances(replace(neutral, pair_bias=0.0, kappa=1.0, spread=0.0))
        chances = np.ones((len(lists) + 1, len(NODES)))
        for kind in np.unique(self.kinds):
            rows = np.flatnonzero(self.kinds == kind)
            chances[rows] = lists[rows] @ (density * kinds[kind]).T
        return chances

    def log_likelihood(self, model: JudgeModel) -> np.ndarray:
        """Return the composite log likelihood of each query."""
        chances = self.chances(model)
        terms = (chances[self.left] * chances[self.right]) @ CHANCES
        return np.bincount(self.of_query, self.weights * np.log(np.maximum(terms, 1e-300)), minlength=self.queries)
