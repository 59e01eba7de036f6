"""What only informs must not end a training: a fault there is one warning, and the run goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.logging import get_logger

logger = get_logger(__name__)


@contextmanager
def non_fatal(what: str) -> Iterator[None]:
    """Turn a fault of the block, or of the decorated function, into one warning.

    A decorated function then returns `None`. Rewards, buffers, budgets and checkpoints do not belong here: without
    them, a run has to end.

    Args:
        what (`str`):
            What is missing after a fault, in the singular.

    Example:
        >>> with non_fatal("the model card"):
        ...     write_model_card(folder, store, facts)
    """
    try:
        yield
    except Exception as error:  # any fault at all; Ctrl-C and `SystemExit` pass
        cause = f"{type(error).__name__}: {error}"
        # A fault of each step would fill the log.
        logger.warning_once(f"{what} only informs and could not be made, so the run goes on without it: {cause}")
