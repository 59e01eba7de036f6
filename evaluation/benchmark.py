"""What a benchmark is to the rest: prompts go out, outputs and judgments lie in official formats, scores come back.

Everything of one model and benchmark lies in one `folder`, so that a killed run goes on there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.guard import defuse

from .metric import Interval, Rows, interval

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""Of ChatML. In an output they would end a turn of the judge's prompt."""

THINKING = ("<think>", "</think>")


class Prompt(NamedTuple):
    """A chat to answer. The id is unique in its benchmark and the same in every run."""

    id: str
    messages: list[dict[str, str]]


class OutputError(RankBufferError, ValueError):
    """Outputs or results that cannot be judged or scored. The message names the file, the rows and what to do."""


@dataclass(frozen=True)
class Scores:
    """What a benchmark says of a model.

    Args:
        headline (`str`):
            The metric that stands for the benchmark: a key of `rows`.
        rows (`Mapping[str, Rows]`):
            For each metric what each prompt adds to it; every metric is their weighted mean, on the scale on which the
            benchmark reports it.
        counts (`Mapping[str, int]`):
            Prompts, judgments, and whatever was null, NaN, empty or dropped.
        official (`Mapping[str, float | str]`, *optional*):
            Numbers that official code gave for the same judgments, or that are not a mean of rows.
        notes (`Sequence[str]`, *optional*):
            What a reader of the numbers has to know.
    """

    headline: str
    rows: Mapping[str, Rows]
    counts: Mapping[str, int]
    official: Mapping[str, float | str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @cached_property
    def _intervals(self) -> dict[str, Interval]:
        return {name: interval(rows) for name, rows in self.rows.items()}

    def metrics(self) -> dict[str, Interval]:
        """Each metric with its 95 % interval."""
        return dict(self._intervals)


class Benchmark(Protocol):
    """One of the four. `__init__(assets: Assets, limit: int | None = None)` loads and checks all official files.

    With a `limit` only the first so many prompts count.
    """

    name: str
    """Its key in configs and folders, such as `wildbench`."""

    title: str
    """For tables, such as `WildBench v2`."""

    def prompts(self) -> list[Prompt]:
        """The chats to answer, in official order."""

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """Write responses by prompt id in the official output format."""

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """Responses by prompt id from the official output format, through [`check_outputs`].

        Raises:
            `FileNotFoundError`: if there are none yet.
            [`OutputError`]: if any cannot be judged.
        """

    def judge(self, folder: Path, model: str, settings: JudgeConfig) -> Totals:
        """Judge what is not judged yet and write the official result format. The cost is that of all judgments there.

        Raises:
            [`JudgeError`]: if the judge cannot do it, before money is spent where that can be known.
        """

    def scores(self, folder: Path, model: str) -> Scores:
        """Score the official result files.

        Raises:
            [`OutputError`]: if they are not whole.
        """


def check_outputs(expected: Sequence[str], found: Iterable[tuple[Any, Any]], where: Path) -> dict[str, str]:
    """Outputs by prompt id, in the order `expected`.

    Args:
        expected (`Sequence[str]`):
            The ids of all prompts.
        found (`Iterable[tuple[Any, Any]]`):
            What a file holds, as (prompt id, text).
        where (`Path`):
            The file.

    Raises:
        [`OutputError`]: if a row is missing, unknown, there twice or no text, or if a text holds thinking or markers
        of a chat template. An empty text is no fault: it is judged as such.
    """
    outputs: dict[str, str] = {}
    twice: list[str] = []
    unknown: list[str] = []
    known = set(expected)
    for key, text in found:
        if not isinstance(text, str):
            raise OutputError(f"{where}: the output of {key!r} is no text but {type(text).__name__}")
        (twice if key in outputs else [] if key in known else unknown).append(key)
        outputs[key] = text
    missing = [key for key in expected if key not in outputs]
    thinking = [key for key, text in outputs.items() if any(tag in text for tag in THINKING)]
    marked = [key for key, text in outputs.items() if any(marker in text for marker in MARKERS)]
    for keys, fault in (
        (missing, "have no output. Generate them, or start anew in another folder"),
        (twice, "have several outputs. Keep one of each"),
        (unknown, "are no prompts of this benchmark, or lie beyond the limit. Use another folder"),
        (thinking, "hold <think> blocks. Keep what follows </think>: the judge must not see the thinking"),
        (marked, "hold ChatML markers, which would change the judge's prompt. Remove them"),
    ):
        if keys:
            raise OutputError(f"{where}: {len(keys)} of {len(expected)} rows {fault}: {shortened(keys)}")
    return {key: outputs[key] for key in expected}


def shortened(keys: Sequence[str], most: int = 5) -> str:
    """A few ids for a message."""
    return ", ".join(map(str, keys[:most])) + (", ..." if len(keys) > most else "")


def without_markers(text: str) -> str:
    """`text` with a space in markers of chats and thinking, which it then only quotes."""
    return defuse(text) if any(marker in text for marker in MARKERS + THINKING) else text
