"""The errors of a judge."""

import re
from base64 import b64encode
from functools import lru_cache
from itertools import accumulate

from ..errors import ServerError

ECHOED = 8  # characters in a row that are taken for a part of a key
PERCENT = re.compile("%[0-9a-f]{2}|.", re.IGNORECASE | re.DOTALL)


class JudgeError(ServerError):
    """The judge cannot be used: it is unreachable, misconfigured or too slow, or it fails too often."""


class TransportError(JudgeError):
    """One request got no usable answer, its transport retries included.

    Args:
        kind (`str`, *optional*, defaults to `"refused"`):
            `down` (no connection, no answer in time, 502 to 504: the server seems to be gone), `busy` (429 and other
            faults that may pass) or `refused` (this request will never be answered).
        status (`int`, *optional*):
            The HTTP status, where there was one.
        retry_after (`float`, *optional*):
            Seconds after which the server says that it takes requests again.
        key (`str`, *optional*):
            The key that was sent.
    """

    def __init__(
        self,
        message: str,
        kind: str = "refused",
        status: int | None = None,
        key: str | None = None,
        retry_after: float | None = None,
    ):
        # A server may echo the key anywhere.
        super().__init__(printable(masked(message, key or "")), passing=kind != "refused")
        self.kind = kind
        self.status = status
        self.retry_after = retry_after

    @property
    def limited(self) -> bool:
        """Whether the server takes no more requests for now."""
        return self.kind == "busy" and self.status == 429


def masked(message: str, key: str) -> str:
    """Replace every part of `key` with at least `ECHOED` characters in `message` by `[key]`."""
    known, length, hidden = parts(key), min(ECHOED, len(key)), set[int]()
    for texts in (list(message), PERCENT.findall(message) if "%" in message else []):
        starts = list(accumulate(map(len, texts), initial=0))
        decoded = "".join(part if len(part) == 1 else chr(int(part[1:], 16)) for part in texts)
        lower = decoded.replace("\u0130", "i").lower()  # the only letter that becomes two
        for i in range(len(lower) - length + 1):
            if lower[i : i + length] in known:
                hidden.update(range(starts[i], starts[i + length]))
    if not hidden:
        return message
    pieces = (part if i not in hidden else "[key]" * (i - 1 not in hidden) for i, part in enumerate(message))
    return "".join(pieces)


@lru_cache(maxsize=8)
def parts(key: str) -> frozenset[str]:
    """Return the parts of a key and of its base64 that no message may show, in small letters."""
    length, forms = min(ECHOED, len(key)), {key}
    if len(key) >= ECHOED:
        for before in range(3):  # bytes of other text, such as "Bearer ". They decide how base64 cuts the key.
            text = b64encode(bytes(before) + key.encode()).decode()
            text = text[-(-before * 4 // 3) : (before + len(key.encode())) * 4 // 3]  # what the key alone decides
            forms |= {text, text.translate({43: "-", 47: "_"})}
    return frozenset(form.lower()[i : i + length] for form in forms for i in range(len(form) - length + 1) if length)


def printable(text: str) -> str:
    """Escape control characters, line breaks and lone surrogates."""
    if text.isprintable():
        return text
    # They harm a terminal, a log or the store.
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def first_leaf(errors: BaseExceptionGroup) -> BaseException:
    """Return the first exception that is not a group."""
    error = errors.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
