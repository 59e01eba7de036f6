"""Evidence that a reader sees less progress than the judge of the run: a sequential test on pairs. Ours.

A policy that is trained by one judge learns that judge's taste. So a second judge, the *reader*, reads along. Both are
asked the same question about the same pair: an old and a new response to one query, in both orders. The share of a
judge is 1 if it prefers the new response in both orders, 1/2 if in one order, and 0 if in none.

**The null hypothesis.** At each draw, the share of the run's judge exceeds the share of the reader by no more than
`tolerance`, on average over all queries and responses that could be drawn. So the reader sees as much progress, or
more. A difference of one pair may have any value in [-1, 1].

**The test.** It bets against the null hypothesis, from a wealth of 1. Before each pair a bet is chosen from the pairs
before it, and the wealth is multiplied by `1 + bet * (difference - tolerance)`. The bet is never below 0, and so small
that a pair takes half of the wealth at most. If the null hypothesis holds, no choice of bets makes the expected wealth
grow: the wealth is a test martingale, and its value is called an *e-value*. By Ville's inequality it reaches `1 / r`
with a probability of `r` at most, over the whole run and whenever one looks. So the alarm at `1 / r` has the rate `r`
of false alarms. The bet is the mean of recent differences over their mean square, roughly the bet under which wealth
grows fastest. Older pairs are forgotten, because a policy may begin to please its judge late in a run.

**Assumptions.** Each pair is drawn afresh: a query, uniformly among all that have two visits so far; an old response
of its first visit, and a new one of its newest visit. The draw depends on the seed and on the number of the pair
alone, never on answers, and a query can be drawn again. So queries may differ in any way and training may change them
in any way: given all pairs before, the expected difference is the average of the null hypothesis. The training must
not react to the reader. A pair without all four verdicts is left out, so the null hypothesis is about pairs with
verdicts.

The alarm says that the two judges part, not who is right. A reader that reads worse than the judge of the run answers
more often by chance, so its share is nearer to 1/2, and it sees less of a true progress too. The tolerance allows for
that.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rankbuffer_trl.decoding import read_json
from rankbuffer_trl.store import BufferStore, StoreError, history
from rankbuffer_trl.store.places import report_folder

WATCH = "watch.json"
KEPT = 0.98  # weight of a pair at the next one: half of what a bet knows is from the last 35 pairs
LARGEST = 0.5  # part of the wealth that a pair can take
MOST = 1e100  # of wealth, which JSON must hold


def e_values(differences: Iterable[float], tolerance: float) -> list[float]:
    """Return the wealth after each pair, see the top of this file.

    Args:
        differences (`Iterable[float]`):
            The share of the run's judge minus that of the reader, in [-1, 1], in the order of the draws.
        tolerance (`float`):
            The mean difference that is no cause for alarm, in 0..1.
    """
    wealth, gained, squared, found = 1.0, 0.0, 0.0, []
    for difference in differences:
        over = difference - tolerance
        bet = min(max(gained / (1 + squared), 0.0), LARGEST / (1 + tolerance))
        wealth = min(wealth * (1 + bet * over), MOST)
        gained, squared = KEPT * gained + over, KEPT * squared + over**2
        found.append(wealth)
    return found


@dataclass(frozen=True)
class WatchedPair:
    """An old and a new response to a query, and what both judges said of them.

    Args:
        query_id (`str`):
            The query.
        old (`str`):
            The id of the old response.
        new (`str`):
            The id of the new response.
        step (`int`):
            The step of the run after which the pair was drawn.
        epoch (`int`):
            The epoch of the new response.
        tokens (`int`):
            What its questions to both judges cost.
        judge (`float`, *optional*):
            The share of the new response by the judge of the run: 0, 1/2 or 1. `None` if a verdict is missing.
        reader (`float`, *optional*):
            The same by the reader.
        estimate (`int`, *optional*, defaults to `0`):
            What its questions were expected to cost.
    """

    query_id: str
    old: str
    new: str
    step: int
    epoch: int
    tokens: int
    judge: float | None = None
    reader: float | None = None
    estimate: int = 0

    def __post_init__(self):
        if {self.judge, self.reader} - {None, 0, 0.5, 1}:
            raise ValueError("judge and reader must be 0, 0.5, 1 or null")


@dataclass(frozen=True)
class Watch:
    """All pairs that a reader has read beside a run, and the settings that must not change meanwhile.

    `judge_digest` and `reader_digest` tell two judges of one name apart. An older file has none of them.
    """

    run: str
    judge: str
    reader: str
    reader_rubrics: bool
    probabilities: bool
    seed: int
    tolerance: float
    false_alarm_rate: float
    pairs: list[WatchedPair]
    judge_digest: str = ""
    reader_digest: str = ""

    def __post_init__(self):
        if not (0 <= self.tolerance < 1 and 0 < self.false_alarm_rate < 1):
            raise ValueError("tolerance and false_alarm_rate must be shares")

    def rows(self) -> list[dict[str, Any]]:
        """Return each pair that has all verdicts: its step, epoch and shares, and the e-value after it."""
        told = [asdict(pair) for pair in self.pairs if pair.judge is not None and pair.reader is not None]
        values = e_values((row["judge"] - row["reader"] for row in told), self.tolerance)
        return [row | {"e_value": value} for row, value in zip(told, values, strict=True)]

    @property
    def e_value(self) -> float:
        """The e-value after the last pair."""
        return next((row["e_value"] for row in reversed(self.rows())), 1.0)

    @property
    def alarm(self) -> int | None:
        """The step of the first pair after which the e-value reached that of the alarm."""
        return next((row["step"] for row in self.rows() if row["e_value"] >= 1 / self.false_alarm_rate), None)

    @property
    def verdict(self) -> str:
        """The evidence in words."""
        alarm = "no alarm" if self.alarm is None else f"ALARM since step {self.alarm}: the reader sees less progress"
        return f"e-value {self.e_value:.3g} of {1 / self.false_alarm_rate:g}, {alarm}"

    def by_epoch(self) -> list[dict[str, Any]]:
        """Return for each epoch the number of pairs, the mean share of both judges, and the e-value at its end."""
        epochs = defaultdict(list)
        for row in self.rows():
            epochs[row["epoch"]].append(row)
        return [
            {"epoch": epoch, "pairs": len(rows)}
            | {side: fmean(row[side] for row in rows) for side in ("judge", "reader")}
            | {"e_value": rows[-1]["e_value"]}
            for epoch, rows in sorted(epochs.items())
        ]


def read_watch(file: Path) -> Watch | None:
    """Return what a file of a watch holds, `None` if it is missing.

    Raises:
        [`StoreError`]: if it is damaged.
    """
    if not file.exists():
        return None
    try:
        return read_json(file, Watch)
    except ValueError as error:
        raise StoreError(f"{file.parent}: {error}: delete that file to begin the watch again") from None


def watch_of(path: Path, store: BufferStore) -> Watch | None:
    """Return the watch of a run, `None` if there is none, or if it is of another run.

    Raises:
        [`StoreError`]: if its file is damaged.
    """
    found = read_watch(report_folder(path) / WATCH)
    return found if found and found.run == history.run_id(store) else None
