"""The errors of a judge."""

from ..errors import RankBufferError


class JudgeError(RankBufferError, RuntimeError):
    """The judge cannot be used: it is unreachable, misconfigured or too slow, or it fails too often."""


class TransportError(JudgeError):
    """One request got no usable answer, its transport retries included.

    Args:
        message (`str`):
            The cause, without keys. Characters that cannot be printed are escaped.
        kind (`str`, *optional*, defaults to `"refused"`):
            `down` (no connection, no answer in time, 502 to 504: the server seems to be gone), `busy` (429 and other
            faults that may pass) or `refused` (this request will never be answered).
        status (`int`, *optional*):
            The HTTP status, where there was one.
    """

    def __init__(self, message: str, kind: str = "refused", status: int | None = None):
        super().__init__(printable(message))
        self.kind = kind
        self.status = status


def printable(text: str) -> str:
    """Escape control characters, line breaks and lone surrogates, which harm a terminal, a log or the store."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def first_leaf(errors: BaseExceptionGroup) -> BaseException:
    """Return the first exception that is not a group."""
    error = errors.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
