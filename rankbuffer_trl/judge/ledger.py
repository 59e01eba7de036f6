"""What a judgment cost: one `Call` per judgment asked for, whether it was answered or not."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple


class Usage(NamedTuple):
    """Tokens of one request as its server counts them. `cached` prompt tokens are part of `prompt`."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Call:
    """One judgment in the ledger.

    Args:
        method (`str`):
            The reward method that asked, such as `rankbuffer`.
        kind (`str`):
            `insert` or `rank`.
        query_id (`str`):
            The query.
        outcome (`str`):
            `parsed`, `malformed` (no valid verdict within the allowed attempts) or `unreachable` (no answer at all).
        attempts (`int`):
            Requests sent, repeats and transport retries included.
        usage (`Usage`):
            Tokens of the answer that was parsed; zero if none was. Reported totals add up these alone, as the paper's
            do.
        spent (`Usage`):
            Tokens of all attempts that were answered.
        seconds (`float`):
            Wall time from the first request to the verdict, without the wait for a free slot.
        error (`str`, *optional*):
            Why the last attempt failed, if the judgment did.
    """

    method: str
    kind: str
    query_id: str
    outcome: str
    attempts: int
    usage: Usage
    spent: Usage
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Totals:
    """Sums over calls. Tokens are those of parsed calls; `spent_*` are those of all attempts."""

    calls: int = 0
    failures: int = 0
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    spent_prompt_tokens: int = 0
    spent_cached_tokens: int = 0
    spent_completion_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Totals":
        """Add up `calls`. `calls` counts parsed ones, `failures` the others."""
        rows = [
            (int(c.outcome == "parsed"), int(c.outcome != "parsed"), c.attempts, *c.usage, *c.spent, c.seconds)
            for c in calls
        ]
        return cls(*(sum(column) for column in zip(*rows, strict=True))) if rows else cls()

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of parsed calls: the paper's judge tokens."""
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, float]:
        """The sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
