"""Load further reward functions that a recipe names, and one of our own, which punishes long answers.

They are functions of TRL or of your own. They stand beside the rank reward, and their weights say how much they count.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from inspect import signature
from statistics import median
from typing import Any

from accelerate.utils import gather_object

from ..errors import SettingsError
from ..settings import is_finite, load_path, parse_json
from .format import Answer

FORM = 'such as [{"function": "trl.rewards.think_format_reward", "weight": 0.5}]'


def load_functions(named: list | str | None) -> tuple[list[Callable], list[float]]:
    """Return the reward functions that `reward_functions` names, and their weights.

    Args:
        named (`list` or `str`, *optional*):
            A list of objects with `function`, and optionally `weight` and `args`; or the same as JSON.

    Raises:
        [`SettingsError`]: if a function does not exist, does not take its `args`, or has no finite weight.
    """
    items = [load_function(item) for item in parse_json("reward_functions", named, list, f"a list {FORM}") or ()]
    return [function for function, _ in items], [weight for _, weight in items]


def load_function(item: Any) -> tuple[Callable, float]:
    """Return one reward function with its weight, or raise [`SettingsError`]."""
    if not isinstance(item, dict) or "function" not in item or not item.keys() <= {"function", "weight", "args"}:
        raise SettingsError(f"an item of reward_functions must have function, weight and args, {FORM}, got {item!r}")
    path, weight, args = item["function"], item.get("weight", 1.0), item.get("args")
    if not is_finite(weight):
        raise SettingsError(f"reward_functions: the weight of {path} must be a finite number, got {weight!r}")
    try:
        function = load_path(str(path))
    except LookupError as error:
        raise SettingsError(f"reward_functions: there is no {path} ({error}): set its dotted path") from error
    if args is not None:  # the path names a function that makes the reward function
        try:
            signature(function).bind(**args)
        except TypeError as error:
            raise SettingsError(f"reward_functions: {path} does not take these args: {error}") from error
        function = function(**args)
    if not callable(function):
        raise SettingsError(f"reward_functions: {path} is not a function")
    return function, float(weight)


def get_group_length_punishment(most: float = 2.0) -> Callable[..., list[float]]:
    """Make a reward function that punishes answers that are longer than the median answer of their group.

    Length is the number of words of the answer, without the thinking. Up to the median of the answers to the same
    query the reward is 0. Above it, the reward falls linearly to -1. A rollout without an answer has the reward 0.

    Args:
        most (`float`, *optional*, defaults to `2.0`):
            Multiple of the median at which the reward is -1, above 1.

    Raises:
        [`SettingsError`]: if `most` is not a number above 1.
    """
    if not is_finite(most) or most <= 1:
        raise SettingsError(f"get_group_length_punishment: most must be a number above 1, got {most!r}")

    def group_length_punishment(
        query_id: Sequence[str], extracted_answer: Sequence[Answer], **kwargs: Any
    ) -> list[float]:
        """Return one reward per completion of this process. A collective: every process must call it."""
        mine = [(id, len(answer.text.split())) for id, answer in zip(query_id, extracted_answer, strict=True)]
        lengths = defaultdict(list)
        for id, words in gather_object(mine):  # a group may be spread over processes
            if words:
                lengths[id].append(words)
        middle = {id: median(found) for id, found in lengths.items()}
        excess = [(words / middle[id] - 1) / (most - 1) if words else 0.0 for id, words in mine]
        return [-min(max(each, 0.0), 1.0) for each in excess]

    return group_length_punishment
