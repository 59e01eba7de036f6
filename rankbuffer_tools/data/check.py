"""Check a training set and estimate the context that its judge needs: the command `rankbuffer-data check`."""

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
from datasets import Dataset
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from rankbuffer_trl.data import GENERIC_RUBRICS, checked_rows, generic_row
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import insertion_question, max_tokens
from rankbuffer_trl.settings import check_at_least

from ..batch.ask import shortened
from ..batch.server_check import context_for
from .lint import SAME, THERE, TWO, odd_rubrics
from .tokens import TokenCounter


@dataclass(frozen=True)
class CheckSettings:
    """The settings of a run on which lengths depend.

    Args:
        k0 (`int`, *optional*, defaults to `4`):
            Anchors of a first buffer.
        guard (`bool`, *optional*, defaults to `True`):
            Whether responses are quoted in judge prompts (`judge_guard`).
        max_prompt_length (`int`, *optional*, defaults to `4096`):
            Tokens that a prompt may have in training.
        max_completion_length (`int`, *optional*, defaults to `4096`):
            Tokens that a rollout may have in training.
        most_shown (`int`, *optional*, defaults to `9`):
            Responses that one judge prompt can show in training, as the reward method says ([`RewardMethod`]). The
            default is that of `rankbuffer` with 4 first anchors and groups of 8.
        free_tokens (`int`, *optional*, defaults to `256`):
            Tokens that an answer may have in addition to the verdict (`judge_free_tokens`).
        sample (`int`, *optional*, defaults to `1000`):
            Number of queries, evenly spread, whose responses are counted. All prompts are counted.
        responses_needed (`int`, *optional*, defaults to `4`):
            Responses that every query must have in a set that is ready. 0 for `method_args: {bootstrap: true}` and for
            methods without references.
    """

    k0: int = 4
    guard: bool = True
    max_prompt_length: int = 4096
    max_completion_length: int = 4096
    most_shown: int = 9
    free_tokens: int = 256
    sample: int = 1000
    responses_needed: int = 4

    def __post_init__(self):
        check_at_least(self, k0=2, sample=1, most_shown=1)
        check_at_least(self, max_prompt_length=1, max_completion_length=1, free_tokens=0)


@dataclass
class Findings:
    """The findings of [`check`]. `lengths` has token counts by the kind of text, `odd_rubrics` ids by the fault."""

    queries: int = 0
    turns: Counter = field(default_factory=Counter)
    responses: Counter = field(default_factory=Counter)
    rubrics: Counter = field(default_factory=Counter)
    weights: Counter = field(default_factory=Counter)
    rubric_words: list[int] = field(default_factory=list)
    odd_rubrics: dict[str, list[str]] = field(default_factory=lambda: {what: [] for what in (THERE, TWO, SAME)})
    same_prompt: list[str] = field(default_factory=list)
    same_response: list[str] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    longest: int = 0  # tokens that a rollout may have, or those of a reference response that is longer
    context: int = 0  # estimated, for `most_shown` responses of this length


def check_dataset(dataset: Dataset, tokens: TokenCounter, settings: CheckSettings) -> Findings:
    """Check all rows of a data set, which may lack rubrics or responses, and measure lengths.

    Raises:
        [`DataError`]: for the first row without the schema of docs/data.md, or if there are no rows.
    """
    findings = Findings()
    prompts: set[str] = set()
    wordy = Query("", [], ())
    generic = {} if "rubrics" in dataset.column_names else generic_row("the data set")
    for number, row in enumerate(checked_rows(dataset, rubrics_needed=False)):
        query = Query.from_row(row | generic)
        count(findings, query)
        for fault in odd_rubrics(
            () if tuple(query.rubrics) == GENERIC_RUBRICS else query.rubrics
        ):  # ours need no advice
            findings.odd_rubrics[fault].append(query.id)
        if (text := plain_text(query)) in prompts:
            findings.same_prompt.append(query.id)
        prompts.add(text)
        length = tokens.chat(query.prompt)
        if length > settings.max_prompt_length:
            findings.too_long.append(query.id)
        lengths = findings.lengths
        lengths.setdefault("prompt", []).append(length)
        if number * settings.sample % len(dataset) < settings.sample:  # evenly spread over the rows
            lengths.setdefault("response", []).extend(map(tokens.text, query.responses))
        # Its prompt needs most, whatever is shown in it.
        wordy = max(wordy, query, key=lambda each: len(each.text) + sum(len(rubric.text) for rubric in each.rubrics))
    findings.longest = max([settings.max_completion_length, *findings.lengths["response"]])  # references are shown too
    findings.context = needed_context(wordy, tokens, settings, findings.longest)
    return findings


def count(findings: Findings, query: Query) -> None:
    """Add the counts of one query that need no tokens."""
    findings.queries += 1
    findings.turns[len(query.prompt)] += 1
    findings.responses[len(query.responses)] += 1
    findings.rubrics[len(query.rubrics)] += 1
    findings.weights.update(rubric.weight for rubric in query.rubrics)
    findings.rubric_words += [len(rubric.text.split()) for rubric in query.rubrics]
    if len(set(query.responses)) < len(query.responses):
        findings.same_response.append(query.id)


def plain_text(query: Query) -> str:
    """Return what a query asks."""
    # Alike if only white space or the form of a letter differs.
    return unicodedata.normalize("NFC", " ".join(query.text.split()))


def needed_context(query: Query, tokens: TokenCounter, settings: CheckSettings, longest: int) -> int:
    """Estimate the context of a judge prompt about `query` whose responses have `longest` tokens each."""
    # `2 * k0` anchors, as before a buffer has grown.
    question = insertion_question(query, [""] * (2 * settings.k0), "")
    frame = tokens.text(question.prompt(settings.guard))
    room = max_tokens(question.verdict, "none", settings.free_tokens)
    return context_for(frame, room, settings.most_shown * longest, settings.guard)


def print_findings(name: str, findings: Findings, tokens: TokenCounter, settings: CheckSettings) -> None:
    """Print the findings."""
    # 119 columns fit the table; a file has no width.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 119)
    for line in lines(name, findings, settings):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(title=f"Tokens ({tokens.name})", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("of a", no_wrap=True)
    for column in ("counted", "least", "median", "95 %", "most"):
        table.add_column(column, justify="right")
    for what, values in findings.lengths.items():
        if values:
            marks = np.quantile(values, [0, 0.5, 0.95, 1])
            table.add_row(what, f"{len(values):,}", *(f"{mark:,.0f}" for mark in marks))
    console.print()
    console.print(table)
    context = (
        f"judge context needed if every response has {findings.longest:,} tokens: about"
        f" {findings.context:,} tokens (a prompt can show {settings.most_shown} responses)"
    )
    for line in (context, *not_ready(findings, tokens, settings)):
        console.print(line, markup=False, soft_wrap=True)


def not_ready(findings: Findings, tokens: TokenCounter, settings: CheckSettings) -> Iterator[str]:
    """Yield what must be done before a run with these settings can start."""
    if missing := findings.rubrics[0]:
        yield f"NOT READY: {missing:,} queries have no rubrics; recipes/generate_rubrics.py makes them"
    needed = settings.responses_needed
    if few := sum(n for count, n in findings.responses.items() if count < needed):
        yield (
            f"NOT READY: {few:,} queries have fewer than {needed} responses; recipes/generate_responses.py makes"
            " them, or train with method_args: {bootstrap: true} and check with --no_responses, or name a --method"
            " that needs none"
        )
    if findings.too_long and tokens.exact:  # an estimate is too high, so it refuses nothing
        yield (
            f"NOT READY: {len(findings.too_long):,} prompts have more than {settings.max_prompt_length:,} tokens;"
            " delete these rows, or raise max_prompt_length"
        )


def lines(name: str, findings: Findings, settings: CheckSettings) -> Iterator[str]:
    """Yield the lines on counts, rubrics and duplicates."""
    yield f"{name}: {findings.queries:,} queries, every row well-formed"
    yield f"messages per prompt: {value_counts(findings.turns)}"
    yield f"responses per query: {value_counts(findings.responses)}"
    if findings.weights:
        mean = fmean(findings.weights.elements())
        yield f"rubrics per query: {value_counts(findings.rubrics)}; {fmean(findings.rubric_words):.0f} words each"
        yield f"weights: {value_counts(findings.weights)}; mean {mean:.2f}"
        for what, ids in findings.odd_rubrics.items():
            yield f"a rubric {what}: {listed(ids)}"
    yield f"the same prompt as an earlier query: {listed(findings.same_prompt)}"
    yield f"the same response twice: {listed(findings.same_response)}"
    yield f"prompts above {settings.max_prompt_length:,} tokens: {listed(findings.too_long)}"


def value_counts(counts: Counter) -> str:
    """Write values with their counts, such as `3 (12), 4 (980)`."""
    return ", ".join(f"{value} ({n:,})" for value, n in sorted(counts.items()))


def listed(query_ids: Sequence[str]) -> str:
    """Write the number of queries and the first three ids."""
    return f"{len(query_ids):,} ({shortened(query_ids, 3)})" if query_ids else "0"
