"""Load further reward functions that a recipe names.

They are functions of TRL or of your own. They stand beside the rank reward, and their weights say how much they count.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import iscoroutinefunction, signature
from itertools import chain, count
from math import inf
from typing import Any

from ..errors import SettingsError
from ..settings import is_finite, load_path, parse_setting

# What TRL and the trainer pass to each reward function by name, beside the further columns of the data set.
GIVEN = (
    *("prompts", "completions", "completion_ids", "query_id", "extracted_answer", "split", "epoch", "trainer_state"),
    *("log_metric", "log_extra"),
)
FORM = 'such as [{"function": "trl.rewards.think_format_reward", "weight": 0.5}]'


def load_functions(named: list | str | None) -> tuple[list[Callable], list[float]]:
    """Return the reward functions that `reward_functions` names, and their weights.

    Args:
        named (`list` or `str`, *optional*):
            A list of objects with `function`, and optionally `weight` and `args`; or the same as JSON.
    """
    items = [load_function(item) for item in parse_setting("reward_functions", named, list, f"a list {FORM}") or ()]
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
            signature(function).bind(**args)  # without a call, so that a bug inside keeps its traceback
        except (TypeError, ValueError) as error:  # some builtins have no signature
            raise SettingsError(f"reward_functions: {path} does not take these args: {error}") from error
        function = function(**args)
    if not callable(function):
        raise SettingsError(f"reward_functions: {path} is not a function")
    return function, float(weight)


def with_inf_for_nan(function: Callable) -> Callable:
    """Return the reward function, which gives inf for NaN: TRL makes NaN of `None`, and leaves such a rollout out."""

    def replaced(values: Iterable) -> list:
        return [value if value == value else inf for value in values]

    async def later(**columns: Any) -> list:
        return replaced(await function(**columns))

    waits = iscoroutinefunction(function) or iscoroutinefunction(function.__call__)  # type: ignore[operator]
    return wraps(function)(later if waits else lambda **columns: replaced(function(**columns)))


def not_finite(name: str, row: int, value: float) -> str:
    """Say in a line which reward function gave infinity or NaN, and for which rollout."""
    text = "inf or NaN" if value == inf else f"{value:g}"
    return f"the reward function {name} gave {text} for rollout {row}: return a finite number, or None to leave it out"


def numbered(names: Sequence[str]) -> list[str]:
    """Return names that all differ."""
    # TRL logs a function by its name, so the second one of a name gets `_2`, or the next free number.
    unique: list[str] = []
    for name in names:
        suffixed = (f"{name}_{n}" for n in count(2))
        unique.append(next(candidate for candidate in chain([name], suffixed) if candidate not in unique))
    return unique


def check_function_arguments(functions: Iterable[Callable], columns: Iterable[str], of: str = "the data set") -> None:
    """Refuse a reward function that cannot take what it is passed, or needs a column that `of` has not."""
    for function in functions:
        try:
            parameters = signature(function)
            # TRL would find it after the judge was paid for a step.
            parameters.bind(**dict.fromkeys((*GIVEN, *columns, *parameters.parameters.keys() & {"environments"})))
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"reward_functions: {getattr(function, '__name__', function)} does not take what TRL passes ({error}):"
                f" it gets the further columns of {of} and much else by name, so let it take **kwargs; a function"
                " that makes the reward function needs args"
            ) from error
