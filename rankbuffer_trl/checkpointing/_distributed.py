"""Work that the main process does for all processes: each of them gets the result or the error."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from ..errors import NotFiniteError

T = TypeVar("T")
EVERYWHERE = "Every process has raised this error, or one that names it."


class MainProcessError(RuntimeError):
    """The error of the other processes when the main process has failed, so that no process waits for it."""

    leaves_step = False  # whether that of the main process does


class StepLeft(Exception):
    """What every process raises when the main process was told to stop while it waited inside a step."""


def for_others(error: Exception) -> Exception:
    """Return what the other processes raise when the main process has raised `error`."""
    if isinstance(error, StepLeft):
        return error
    repeated = MainProcessError(f"the main process failed with {type(error).__name__}: {error}")
    repeated.leaves_step = getattr(error, "leaves_step", False)
    if repeated.leaves_step:
        error.add_note(EVERYWHERE)
    return repeated


def leaves_step(error: Exception) -> bool:
    """Return whether an error ends a step alone, and every process raises it."""
    # Then they can save together. An error of a user's reward function may be known to its process alone: the others
    # would not come to the saving.
    on_all = isinstance(error, MainProcessError | NotFiniteError) or EVERYWHERE in getattr(error, "__notes__", ())
    return getattr(error, "leaves_step", False) and (on_all or PartialState().num_processes == 1)


def on_main_process(work: Callable[[], T]) -> T:
    """Run `work` on the main process; return its result, or raise its error, on every process.

    This is a collective: every process must call it. The result is pickled, unless there is one process.

    Raises:
        [`MainProcessError`]: on the other processes, if `work` raised an error on the main process.

    Example:
        >>> on_main_process(lambda: 6 * 7)
        42
    """
    state = PartialState()
    failure = None
    payload: list = [None, None]
    if state.is_main_process:
        try:
            payload[0] = work()
        except Exception as error:  # not Ctrl-C, which the terminal sends to every process
            failure, payload[1] = error, for_others(error)
    broadcast_object_list(payload, from_process=0)
    if failure is not None:  # after the broadcast, so that no process waits
        raise failure
    if payload[1] is not None:
        raise payload[1]
    return payload[0]


def made_on_main_process(make: Callable[[], T]) -> T | None:
    """Return what `make` makes on the main process, `None` on the others. It is a collective, as above."""
    made: list[T] = []
    on_main_process(lambda: made.append(make()))  # what it makes is not sent, and need not be pickled
    return made[0] if made else None
