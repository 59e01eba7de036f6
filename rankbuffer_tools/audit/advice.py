"""Advice about methods under a budget, from an audit of the judge. This file is ours, not the paper's.

All taus are relative to the judge's own settled opinion. Without labels, nothing here is about truth. How often the
advice is right for simulated judges is in experiments/audit_trials.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.rewards.beyond.looks import mean_places

from .expected import METHODS, G, Judged, Rewards, draw, tau, tied
from .fit import LABELS, Fit, Label, label_agreement
from .model import QueryLooks

LISTS = ("beyond/listwise_one", "beyond/listwise_two")  # the rule without an audit
POINTWISE, RATINGS_SOFT = "paper/grpo", "beyond/ratings_soft"
SURE = 0.8  # the share of the models that the audit allows in which another method must beat the rule
ALARM = 0.91  # an estimate of kappa below it is an alarm; experiments/audit_trials says how this number was chosen
Taus = Mapping[str, tuple[float, np.ndarray]]
"""The expected tau of each method, and its values for all draws of a fit."""


@dataclass(frozen=True)
class MethodCosts:
    """What a question costs, as the audit saw it, and the size of the run.

    The tokens of other questions follow from those of a list of 8 and of a pair: a part per prompt, and a part per
    response in it. Shared prefixes count in full.

    Args:
        groups (`int`):
            The number of groups of 8 rollouts that the run judges.
        in_list, in_pair (`tuple[float, float]`):
            Mean prompt and completion tokens of a question about a list of 8, and about a pair.
        tokens_per_second (`float`):
            The rate of the audit, with its number of questions in flight.
        prices (`tuple[float, float]`, *optional*):
            Prices of a million prompt tokens and of a million completion tokens.
        samples (`int`, *optional*, defaults to `1`):
            Answers to a question whose probabilities are read (`judge_samples`).
    """

    groups: int
    in_list: tuple[float, float]
    in_pair: tuple[float, float]
    tokens_per_second: float
    prices: tuple[float, float] | None = None
    samples: int = 1

    def run(self, prompts: float, responses: float) -> tuple[float, float]:
        """Return prompt and completion tokens of the run, from prompts per group and the responses in all of them."""
        prompt, completion = (
            self.groups * (prompts * max(pair - 2 * each, 0) + responses * each)
            for many, pair in zip(self.in_list, self.in_pair, strict=True)
            for each in [max((many - pair) / (G - 2), 0)]
        )
        return prompt, completion


@dataclass(frozen=True)
class MethodRow:
    """A method, how well it orders groups relative to the judge's settled opinion, and what the run would cost.

    Args:
        recipe (`str`):
            The recipe, without `recipes/` and `.yaml`.
        pairs (`bool`):
            Whether the method asks about pairs.
        tau, low, high (`float`):
            Expected tau-b within a group of 8, and its 95 % interval.
        tied (`float`):
            Share of rollouts that share their reward with another one of the group.
        tokens, hours (`float`):
            Judge tokens of the run, and hours at the audit's rate.
        price (`float`, *optional*):
            The price of these tokens; `None` if no prices are set.
        fits (`bool`):
            Whether the run stays within the budget.
    """

    recipe: str
    pairs: bool
    tau: float
    low: float
    high: float
    tied: float
    tokens: float
    hours: float
    price: float | None
    fits: bool


@dataclass(frozen=True)
class Advice:
    """The table of methods, the rule without an audit, and what the audit advises.

    Args:
        rows (`Sequence[MethodRow]`):
            All methods, the best one first.
        rule (`str`, *optional*):
            The recipe that the rule without an audit takes; `None` if nothing fits.
        advised (`str`, *optional*):
            The recipe that the audit advises; `None` if nothing fits, or if it refuses to choose.
        alarm (`bool`):
            Whether lists and pairs seem to settle on different opinions.
        sentences (`Sequence[str]`):
            What to tell people below the table.
    """

    rows: Sequence[MethodRow]
    rule: str | None
    advised: str | None
    alarm: bool
    sentences: Sequence[str]

    def as_dict(self) -> dict:
        """Return all numbers, for `audit.json`."""
        return asdict(self)


def advise(
    fit: Fit,
    looks: Sequence[QueryLooks],
    costs: MethodCosts,
    budget: float,
    labels: Sequence[Label] = (),
    in_price: bool = False,
) -> Advice:
    """Compare methods under a budget.

    The rule without an audit is the most looks at the whole list that fit. Another method is advised only if it is
    better in at least 80 % of the models of the judge that the audit allows.

    Args:
        fit (`Fit`):
            The model of the judge, and the models that the data allow.
        looks (`Sequence[QueryLooks]`):
            What the audit read. The ratings in it give the tau of pointwise rewards, and their means under the judge's
            probabilities that of soft ratings.
        costs (`MethodCosts`):
            The cost of questions, and the number of groups.
        budget (`float`):
            Judge tokens of the whole run, above 0. Infinite for no limit.
        labels (`Sequence[Label]`, *optional*):
            The user's own verdicts about pairs that the audit asked about. They decide between lists and pairs if
            these settle on different opinions, and nothing else.
        in_price (`bool`, *optional*, defaults to `False`):
            Whether the budget is a price.

    Raises:
        [`SettingsError`]: if the budget is not above 0, or if it is a price and no prices are set.
    """
    if not budget > 0:
        raise SettingsError(f"budget must be above 0, got {budget:g}")
    if in_price and costs.prices is None:
        raise SettingsError("a budget in price needs judge_prompt_price and judge_completion_price")
    taus, rewards = predict(fit, looks)
    rows = tabulate(taus, rewards, costs, budget, in_price)
    alarm, shares, missing = bool(fit.model.kappa < ALARM), None, f"{LABELS} labels or more would decide."
    if alarm and labels:
        try:
            lists, pairs = label_agreement(fit, looks, labels)
            shares = lists.value, pairs.value
        except RankBufferError as error:
            missing = f"Labels would decide, but {error}."
    rule, advised, sentences = choose(rows, taus, alarm, shares)
    if alarm:
        sentences.insert(0, f"Lists and pairs settle on different opinions (kappa {fit.model.kappa:.2f}).")
    if rule and not advised:
        sentences.append(missing)
    return Advice(rows, rule, advised, alarm, sentences)


def choose(
    rows: Sequence[MethodRow], taus: Taus, alarm: bool = False, shares: tuple[float, float] | None = None
) -> tuple[str | None, str | None, list[str]]:
    """Return the rule's recipe, the advised one, and sentences about both.

    Args:
        rows (`Sequence[MethodRow]`):
            The methods, the best one first.
        taus (`Taus`):
            Their taus, from [`predict`].
        alarm (`bool`, *optional*, defaults to `False`):
            Whether lists and pairs settle on different opinions.
        shares (`tuple[float, float]`, *optional*):
            The shares of what lists and of what pairs settle on with which labels agree. They decide on an alarm.
    """
    affordable = [row for row in rows if row.fits]
    rule = max((row for row in affordable if row.recipe in LISTS), key=lambda row: row.tokens, default=None)
    if rule is None:
        least = min(rows, key=lambda row: row.tokens)
        cost = f"{least.tokens:,.0f} tokens" + ("" if least.price is None else f", {least.price:,.2f} in price")
        return None, None, [f"Nothing fits the budget. The cheapest method is {least.recipe}, with {cost}."]
    sentences = [
        "Tau is the agreement of rewards with this judge's own settled opinion, within a group. It is not accuracy.",
        f"Without an audit: {rule.recipe}, the most looks at the whole list that fit.",
    ]
    if alarm and len({row.pairs for row in affordable}) == 2:
        lists, pairs = (next(row for row in affordable if row.pairs == kind) for kind in (False, True))
        if shares is None:
            told = f"No advice between {lists.recipe}, the best with lists, and {pairs.recipe}, the best with pairs."
            return rule.recipe, None, [*sentences, told]
        best = max(lists, pairs, key=lambda row: attenuated(row.tau, shares[row.pairs]))
        told = f"{shares[0]:.0%} of what lists settle on, and with {shares[1]:.0%} of what pairs settle on"
        return rule.recipe, best.recipe, [*sentences, f"Advice: {best.recipe}. The labels agree with {told}."]
    best = affordable[0]
    sure = float(np.mean(taus[best.recipe][1] > taus[rule.recipe][1]))
    share = f"better in {sure:.0%} of the models that the audit allows"
    if best is rule:
        sentences.append("Advice: the same. The audit finds no better method that fits.")
    elif sure < SURE:
        sentences.append(f"Advice: the same. {best.recipe} is {share}, and {SURE:.0%} would be enough.")
    else:
        sentences.append(f"Advice: {best.recipe}. It is {share}, by {best.tau - rule.tau:.3f} in tau.")
    return rule.recipe, best.recipe if sure >= SURE else rule.recipe, sentences


def predict(fit: Fit, looks: Sequence[QueryLooks]) -> tuple[Taus, Mapping[str, Rewards]]:
    """Return the expected tau of each method and its values for all draws of a fit, and the rewards behind it.

    The model knows nothing of ratings. Their tau is measured, by their agreement with the lists.
    The values for the draws come from fewer groups. Only their differences from the model's value are used.
    """
    many, few = draw(2000), draw(100)
    judged = Judged(fit.model, many)
    rewards = {recipe: method(judged) for recipe, method in METHODS.items()}
    draws = [Judged(model, few) for model in (fit.model, *fit.draws)]
    taus = {}
    for recipe, method in METHODS.items():
        center = judged.tau(rewards[recipe])
        first, *others = (one.tau(method(one)) for one in draws)
        taus[recipe] = (center, np.clip(center + np.array(others) - first, -1, 1))
    four, allowed = taus[LISTS[-1]]
    for recipe, ratings in ((POINTWISE, [one.ratings for one in looks]), (RATINGS_SOFT, [one.means for one in looks])):
        rated = [(each, one.orders) for each, one in zip(ratings, looks, strict=True) if len(each) == G and one.orders]
        if len(rated) < 2:
            continue
        scores = np.array([each for each, _ in rated])
        places = [mean_places(orders) for _, orders in rated]
        agree = tau(scores, np.array([[float(place[i]) for i in range(G)] for place in places]))
        resampled = np.random.default_rng(0).choice(agree, (len(fit.draws), len(agree))).mean(1)
        taus[recipe] = (float(disattenuated(agree.mean(), np.array(four))), disattenuated(resampled, allowed))
        rewards[recipe] = Rewards(scores, G, G)
    return taus, rewards


def tabulate(
    taus: Taus, rewards: Mapping[str, Rewards], costs: MethodCosts, budget: float, in_price: bool = False
) -> list[MethodRow]:
    """Return the rows of all methods, the best one first."""
    rows = []
    for recipe, (center, allowed) in taus.items():
        found = rewards[recipe]
        prompt, completion = costs.run(found.prompts, found.responses)
        completion *= costs.samples if recipe == RATINGS_SOFT else 1
        tokens = prompt + completion
        price = None if costs.prices is None else (prompt * costs.prices[0] + completion * costs.prices[1]) / 1e6
        low, high = np.quantile(allowed, [0.025, 0.975]).tolist()
        hours = tokens / costs.tokens_per_second / 3600
        fits = (price if in_price and price is not None else tokens) <= budget
        rows.append(MethodRow(recipe, found.pairs, center, low, high, tied(found.places), tokens, hours, price, fits))
    return sorted(rows, key=lambda row: -row.tau)


def attenuated(agreement: float, share: float) -> float:
    """Return the tau with labels, from that with an opinion and the share of the opinion with which labels agree."""
    return 2 / math.pi * math.asin(math.sin(math.pi * (share - 0.5)) * math.sin(math.pi / 2 * agreement))


def disattenuated(agreement: np.ndarray, reliability: np.ndarray) -> np.ndarray:
    """Return the tau with the settled opinion, from that with a consensus and from the consensus's own tau."""
    ratio = np.sin(np.pi / 2 * agreement) / np.sin(np.pi / 2 * np.maximum(reliability, 0.05))
    return 2 / np.pi * np.arcsin(np.clip(ratio, -1, 1))
