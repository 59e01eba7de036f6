"""The base class of all errors that a user can mend."""


class RankBufferError(Exception):
    """An error that the user can mend: in a setting, a data set, a server or a file.

    Its text is one line that says what is wrong, where, and what to do. Commands print that line and exit with status
    1, `rankbuffer-train` with 75 if a server failed. They catch this class and `OSError` only, so that a bug in the
    code keeps its traceback.

    Example:

    ```python
    from rankbuffer_trl import RankBufferError, load_queries

    try:
        queries = load_queries("queries.jsonl")
    except RankBufferError as error:
        print(f"error: {error}")
    ```
    """

    leaves_step = False
    """Whether the error ends a training step alone, on all processes, so that the steps before it can be saved."""


class NotFiniteError(RankBufferError, ArithmeticError):
    """A reward or a gradient is infinite or no number, which one step would put into all weights of the policy.

    Every process raises it, since all have the same rewards and the same gradient.
    """

    leaves_step = True


class ServerError(RankBufferError, RuntimeError):
    """A server does not do its part of a step.

    Args:
        message (`str`):
            The cause, and what to do.
        passing (`bool`, *optional*, defaults to `True`):
            Whether the same request may be answered later.
    """

    leaves_step = True

    def __init__(self, message: str, passing: bool = True):
        super().__init__(message)
        self.passing = passing


class SettingsError(RankBufferError, ValueError):
    """A setting has a value that cannot work, or two settings contradict each other."""
