"""What judges believe, in the form in which OpenAI's interface tells it."""

import math
from collections.abc import Mapping

from rankbuffer_trl.testing import SHOWN, quality, unguarded


def place(token: str, chances: Mapping[str, float]) -> dict:
    """One place of an answer: the token that was said, and the probabilities of the listed tokens."""
    listed = [{"token": each, "logprob": math.log(chance)} for each, chance in chances.items()]
    return {"token": token, "logprob": math.log(chances.get(token, 1.0)), "top_logprobs": listed}


def spelled(*places: str | tuple[str, Mapping[str, float]]) -> dict:
    """The log probabilities of an answer: tokens without a doubt, and (token, probabilities)."""
    return {"content": [place(p, {p: 1.0}) if isinstance(p, str) else place(*p) for p in places]}


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Probabilities from log weights."""
    most = max(weights.values())
    powers = {name: math.exp(weight - most) for name, weight in weights.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def opinion(prompt: str, bias: float, slope: float = 0.01) -> tuple[str, dict]:
    """Answer a pair, a rating or an insertion as a judge with an opinion does: a word, and its log probabilities.

    Args:
        prompt (`str`):
            The prompt.
        bias (`float`):
            What the judge's habit is worth in log odds: the response that stands first, or the highest number but one.
        slope (`float`):
            The log odds that a point of quality is worth, of one response over the other or of each score over the
            next lower one.
    """
    shown = [quality(text) for text in SHOWN.findall(unguarded(prompt))]
    if '"winner"' in prompt:
        first, second = shown
        key, before, after, weights = "winner", '": "', '"}', {"A": bias + slope * (first - second), "B": 0.0}
    else:
        key, most = ("score", 9) if '"score"' in prompt else ("position", len(shown) - 1)
        before, after = '": ', "}"
        weights = {str(n): slope * n * shown[-1] + bias * (n == most - 1) for n in range(most + 1)}
    chances = shares(weights)
    word = max(chances, key=chances.get)
    return f'{{"{key}{before}{word}{after}', spelled('{"', key, before, (word, chances), after)
