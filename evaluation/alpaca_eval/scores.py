"""AlpacaEval's arithmetic: which output is shown first, how a judgment is read, and the win rate of preferences.

It follows the official annotator `weighted_alpaca_eval_gpt4_turbo`, whose judge answers with one token, `m` or `M`.
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from rankbuffer_trl.judge import VerdictError, checked_logprob, read_tokens

from ..metric import Row

ORDER_SEED = 0  # the official seed, for the official order of each pair


def is_switched(instruction: str) -> bool:
    """Return whether the judge sees the model's output first, as `m`."""
    return random.Random(f"is_switched_outputs{instruction}{ORDER_SEED}").choices([False, True])[0]


def read_preference(logprobs: Any, switched: bool) -> float | None:
    """Return the preference in the log probabilities of the judge's first token. `switched`: see [`is_switched`].

    Returns:
        `float` or `None`: from 1 (the baseline is better) to 2 (the model is better), `None` if neither `m` nor `M`
        is among the likeliest tokens.

    Raises:
        [`VerdictError`]: if there are no log probabilities, or that of `m` or `M` is above 0 or NaN.
    """
    top = dict(read_tokens(logprobs)[0][1])
    usable = {
        token: checked_logprob(token, top[token]) for token in ("m", "M") if top.get(token, -math.inf) != -math.inf
    }
    if not usable:  # the official code gives no preference then, and neither do we
        return None
    likeliest = max(usable.values())  # keeps the sum below from being 0
    shares = {token: math.exp(value - likeliest) for token, value in usable.items()}
    first = shares.get("m", 0.0) / sum(shares.values())
    return 1 + first if switched else 2 - first  # switched: the model's output is `m`


def read_pilot_preference(logprobs: Any, switched: bool) -> float:
    """Return the preference as [`read_preference`] does, but refuse a reply in which neither token is likely."""
    preference = read_preference(logprobs, switched)
    if preference is None:
        raise VerdictError(
            "the judge's first token should be m or M, and among its five likeliest neither is: it said"
            f" {logprobs['content'][0].get('token')!r}. A thinking judge begins with its thoughts: switch them off,"
            ' such as with judge_request: {"chat_template_kwargs": {"enable_thinking": false}}'
        )
    return preference


def win_rate_rows(preferences: Mapping[str, float | None]) -> dict[str, Row]:
    """Return wins in per cent by prompt id: 0 if the baseline is better, 100 if the model is, 50 if they are equal."""
    judged = {id: float(p) for id, p in preferences.items() if p is not None and not math.isnan(p)}
    # 1 is the baseline, 2 the model, 0 or 1.5 an equal output.
    return {id: Row(100 * ((preference or 1.5) - 1)) for id, preference in judged.items()}
