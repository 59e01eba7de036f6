"""The interface of every benchmark: prompts, official formats for outputs and judgments, and scores.

Everything of one model and one benchmark lies in one `folder`, so a killed run continues there.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rankbuffer_tools.batch.ask import shortened
from rankbuffer_tools.batch.sampling import Prompt
from rankbuffer_trl.decoding import excerpt
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import Totals, VerdictError, defuse, read_object
from rankbuffer_trl.judge.config import FailureLimit

from .metric import Interval, Rows, bootstrap_interval, paired_difference

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
"""In an output they would end a turn of the judge's prompt."""

AROUND = "text_around"  # official code drops such verdicts, so they are counted
"""The key that marks a verdict whose answer had text around its object."""

THINKING = ("<think>", "</think>")


class OutputError(RankBufferError, ValueError):
    """Outputs or results cannot be judged or scored. The message names the file, the rows and what to do."""


@dataclass(frozen=True)
class BenchmarkScores:
    """The scores of one model on one benchmark. Every metric is the weighted mean of its rows."""

    headline: str  # the main metric, a key of `rows`
    rows: Mapping[str, Rows]  # by metric, on the scale on which the benchmark reports it
    counts: Mapping[str, int]  # prompts, judgments, and all that was null, NaN, empty or dropped
    official: Mapping[str, float | str] = field(default_factory=dict)  # computed by official code, or no mean of rows
    notes: Sequence[str] = ()  # what a reader of the numbers has to know
    # `rows` of these prompts alone, where weights depend on the others.
    among: Callable[[Collection[str]], Mapping[str, Rows]] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _intervals(self) -> dict[str, Interval]:
        # 2,000 resamples, so once for all readers.
        return {name: bootstrap_interval(rows) for name, rows in self.rows.items()}

    def metrics(self) -> dict[str, Interval]:
        """Return each metric with its 95 % interval."""
        return dict(self._intervals)

    def minus(self, other: "BenchmarkScores", metric: str) -> Interval:
        """Return how much higher a metric is than that of another model, over the prompts of both."""
        shared = self.rows[metric].keys() & other.rows[metric].keys()
        mine, theirs = (scores.among(shared) if scores.among else scores.rows for scores in (self, other))
        return paired_difference(theirs[metric], mine[metric])


class Benchmark(Protocol):
    """A benchmark. Its class is called with `assets` and `limit`, and loads and checks all official files.

    With a `limit`, only the first `limit` prompts count.
    """

    name: str  # its key in settings and folders, such as `wildbench`
    title: str  # its name in tables, such as `WildBench v2`

    def prompts(self) -> list[Prompt]:
        """Return the chats to answer, in official order."""

    def write_outputs(self, folder: Path, model: str, responses: Mapping[str, str]) -> None:
        """Write responses by prompt id in the official output format."""

    def read_outputs(self, folder: Path, model: str) -> dict[str, str]:
        """Return the responses by prompt id, read from the official output format and checked by [`check_outputs`].

        Raises:
            `FileNotFoundError`: if there are none yet.
            [`OutputError`]: if any of them cannot be judged.
        """

    def judge(self, folder: Path, model: str, settings: FailureLimit) -> Totals:
        """Judge what is not judged yet, write the official result format, and return the cost, also of earlier runs.

        Raises:
            [`JudgeError`]: if the judge cannot do it, before money is spent where that can be known.
        """

    def scores(self, folder: Path, model: str) -> BenchmarkScores:
        """Score the official result files.

        Raises:
            [`OutputError`]: if they are incomplete.
        """


def check_outputs(expected: Sequence[str], rows: Iterable[tuple[Any, Any]], where: Path) -> dict[str, str]:
    """Check the rows (prompt id, text) of a file and return the texts by id, in the order of `expected`.

    Raises:
        [`OutputError`]: if a row is missing, unknown, duplicated or no text, or if a text holds thinking or markers
            of a chat template.
    """
    outputs: dict[str, str] = {}
    twice: list[str] = []
    unknown: list[str] = []
    ids = set(expected)
    for key, text in rows:
        if not isinstance(key, str):
            raise OutputError(f"{where}: {excerpt(key)} is no id of a prompt, which is a text")
        if not isinstance(text, str):  # an empty text passes: it is judged as such
            raise OutputError(f"{where}: the output of {key!r} is no text but {type(text).__name__}")
        if key in outputs:
            twice.append(key)
        elif key not in ids:
            unknown.append(key)
        outputs[key] = text
    missing = [key for key in expected if key not in outputs]
    thinking = [key for key, text in outputs.items() if any(tag in text for tag in THINKING)]
    marked = [key for key, text in outputs.items() if any(marker in text for marker in CHATML_MARKERS)]
    for keys, fault in (
        (missing, "have no output. Generate them, or start in another folder"),
        (twice, "have several outputs. Keep one of each"),
        (unknown, "are no prompts of this benchmark, or lie beyond the limit. Use another folder"),
        (thinking, "hold <think> blocks. Keep what follows </think>: the judge must not see the thinking"),
        (marked, "hold ChatML markers, which would change the judge's prompt. Remove them"),
    ):
        if keys:
            raise OutputError(f"{where}: {len(keys)} of {len(expected)} rows {fault}: {shortened(keys)}")
    return {key: outputs[key] for key in expected}


def without_markers(text: str) -> str:
    """Return `text` with a space inside each marker of a chat or of thinking, so that a prompt only quotes it."""
    return defuse(text) if any(marker in text for marker in CHATML_MARKERS + THINKING) else text


def read_json_answer(text: str, keys: Sequence[str], cut_off: bool = False) -> dict[str, Any]:
    """Return the one JSON object in a judge's answer, which must have `keys`. See [`read_object`].

    Raises:
        [`VerdictError`]: if there is no such object, or if no file can store it.
    """
    verdict, around = read_object(text, keys, cut_off)
    try:
        json.dumps(verdict, ensure_ascii=False).encode()  # refuses a lone surrogate, which no file can store
    except ValueError as error:
        raise VerdictError(f"the answer is not valid JSON: {error}") from None
    return verdict | ({AROUND: True} if around else {})


def count_around(scores: BenchmarkScores, verdicts: Iterable[Any]) -> BenchmarkScores:
    """Add to the counts how many verdicts official code would have dropped, if there are any."""
    count = sum(isinstance(verdict, dict) and AROUND in verdict for verdict in verdicts)
    return replace(scores, counts={**scores.counts, "verdicts with text around them": count}) if count else scores
