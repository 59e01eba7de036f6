"""The one thing this project asks of several processes: the main one works, all get the result or the error."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

T = TypeVar("T")


class MainProcessError(RuntimeError):
    """Raised on the other processes when the main process failed, so that none waits for it."""


def on_main_process(work: Callable[[], T]) -> T:
    """Run `work` on the main process; return its result, or raise its error, on every process.

    A collective: every process must call it. An interrupt is not broadcast, since every process gets its own.
    """
    state = PartialState()
    failure = None
    payload: list = [None, None]
    if state.is_main_process:
        try:
            payload[0] = work()
        except Exception as error:
            failure, payload[1] = error, f"{type(error).__name__}: {error}"
    broadcast_object_list(payload, from_process=0)
    if failure is not None:
        raise failure
    if payload[1] is not None:
        raise MainProcessError(f"the main process failed with {payload[1]}")
    return payload[0]
