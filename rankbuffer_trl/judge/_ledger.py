"""The ledger: one `Call` with the cost of each judgment, whether the judgment was answered or not."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

FAILURES = ("malformed", "unreachable")
REFERENCE = "reader"  # the method of the calls of a reference judge, which scores some groups again
KIND_NAMES = {"look": "pass", "again": "rerank"}  # what tables show for kinds whose names in ledgers are older
# tokens of one request: far above any context, and four billion such counts fit into SQLite's integer
MOST_TOKENS = 2**31 - 1
ANSWER_KEPT = 4000  # characters of a last answer that a call keeps for messages to people


class Usage(NamedTuple):
    """Tokens of one request as its server counts them."""

    prompt: int = 0
    cached: int = 0  # these are part of `prompt`
    completion: int = 0

    def __add__(self, other: "Usage") -> "Usage":  # type: ignore[override]  # a tuple's would concatenate
        return Usage(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def possible(self) -> "Usage":
        """The same counts, with 0 for each that cannot be true."""
        return Usage(*(n if type(n) is int and 0 <= n <= MOST_TOKENS else 0 for n in self))


class Reply(NamedTuple):
    """The answer of a chat client to one request."""

    text: str  # empty if there is none
    usage: Usage  # zero where the server does not say
    cut_off: bool = False  # whether it ended before its end, most often at its token limit
    logprobs: Any = None  # in the server's form, if the request asked for them
    samples: tuple["Reply", ...] = ()  # all answers, this one first, if the request asked for several
    note: str = ""  # what the server says of an answer that may not be whole, for the fault
    final: bool = False  # whether the server withheld the answer: the question is not asked again


@dataclass
class Tally:
    """The cost of one judgment so far. The client counts each request at once, so a fault or cancel loses nothing."""

    attempts: int = 0
    malformed: int = 0
    seconds: float = 0.0
    server: str = ""
    spent: Usage = field(default_factory=Usage)


@dataclass(frozen=True)
class Call:
    """One judgment in the ledger. The last three fields are not stored.

    Args:
        server (`str`):
            Host and port of the server that answered or failed last; empty for a judge without a server.
        outcome (`str`):
            `parsed`, `malformed` (no valid verdict within the allowed attempts), `unreachable` (no answer at all) or
            `cancelled` (its step ended before the answer).
        attempts (`int`):
            Requests sent, repeats and transport retries included; the retries of a cancelled request are not known.
        usage, spent (`Usage`):
            Tokens of the answer that was parsed, and of all attempts that were answered.
        seconds (`float`):
            Wall time of its requests, without the wait for a free slot.
        error (`str`, *optional*):
            Why the last attempt failed, if the judgment did.
    """

    method: str  # the reward method that asked, such as `rankbuffer`
    kind: str  # what was asked, such as `insert`, `fine` or `bootstrap`
    query_id: str
    server: str
    outcome: str
    attempts: int
    usage: Usage  # totals add up these alone, as the paper's do
    spent: Usage
    seconds: float
    error: str = ""
    malformed: int = 0  # with a default, since answer logs of earlier versions lack it
    answer: str = field(default="", repr=False, compare=False)  # the beginning of the last one, for messages to people
    # The HTTP status that the last attempt failed with.
    status: int | None = field(default=None, repr=False, compare=False)
    # Whether the last fault may pass, as that of a server that is down.
    passing: bool = field(default=False, repr=False, compare=False)

    @property
    def fault(self) -> str:
        """The outcome for a reader, to whom a server that refuses a question is not unreachable."""
        refused = self.outcome == "unreachable" and self.status is not None and not self.passing
        return "refused" if refused else self.outcome

    @property
    def failed(self) -> bool:
        """Whether the judgment has no verdict, although it was not cancelled."""
        return self.outcome in FAILURES

    def as_dict(self) -> dict[str, Any]:
        """Return the stored fields by name, in types that JSON has."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.compare}


@dataclass(frozen=True)
class Totals:
    """Sums over calls. Tokens are those of parsed calls; `spent_*` are those of all attempts."""

    calls: int = 0
    failures: int = 0
    attempts: int = 0
    malformed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    spent_prompt_tokens: int = 0
    spent_cached_tokens: int = 0
    spent_completion_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, calls: Iterable[Call]) -> "Totals":
        """Add up `calls`. The field `calls` counts parsed ones, `failures` those that ended without a verdict."""
        rows = [
            (int(c.outcome == "parsed"), int(c.failed), c.attempts, c.malformed, *c.usage, *c.spent, c.seconds)
            for c in calls
        ]
        return cls(*(sum(column) for column in zip(*rows, strict=True))) if rows else cls()

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of parsed calls: the paper's judge tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def spent_tokens(self) -> int:
        """Prompt and completion tokens of all answered attempts. A server may also charge one that was given up."""
        return self.spent_prompt_tokens + self.spent_completion_tokens

    def as_dict(self) -> dict[str, float]:
        """Return the sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
