"""The errors of a judge."""

from ..errors import RankBufferError

ECHOED = 8  # characters in a row that are taken for a part of a key


class JudgeError(RankBufferError, RuntimeError):
    """The judge cannot be used: it is unreachable, misconfigured or too slow, or it fails too often."""


class TransportError(JudgeError):
    """One request got no usable answer, its transport retries included.

    Args:
        message (`str`):
            The cause. Characters that cannot be printed are escaped.
        kind (`str`, *optional*, defaults to `"refused"`):
            `down` (no connection, no answer in time, 502 to 504: the server seems to be gone), `busy` (429 and other
            faults that may pass) or `refused` (this request will never be answered).
        status (`int`, *optional*):
            The HTTP status, where there was one.
        key (`str`, *optional*):
            The key that was sent. It is masked in the message, since a server may echo it anywhere.
    """

    def __init__(self, message: str, kind: str = "refused", status: int | None = None, key: str | None = None):
        super().__init__(printable(masked(message, key or "")))
        self.kind = kind
        self.status = status


def masked(message: str, key: str) -> str:
    """Replace every part of `key` with at least `ECHOED` characters in `message` by `[key]`, in capitals too."""
    length = min(ECHOED, len(key))
    key, lower = key.lower(), message.replace("\u0130", "i").lower()  # the only letter that becomes two
    hidden: set[int] = set()
    for piece in {key[i : i + length] for i in range(len(key) - length + 1) if length}:
        start = lower.find(piece)
        while start >= 0:
            hidden.update(range(start, start + length))
            start = lower.find(piece, start + 1)
    if not hidden:
        return message
    pieces = (each if i not in hidden else "[key]" * (i - 1 not in hidden) for i, each in enumerate(message))
    return "".join(pieces)


def printable(text: str) -> str:
    """Escape control characters, line breaks and lone surrogates, which harm a terminal, a log or the store."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def first_leaf(errors: BaseExceptionGroup) -> BaseException:
    """Return the first exception that is not a group."""
    error = errors.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
