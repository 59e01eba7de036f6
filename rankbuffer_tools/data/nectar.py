"""Turn Nectar's rows into rows of a training set, and sample them.

A row of `berkeley-nest/Nectar` has a `prompt` as one text, `\\n\\nHuman: ...\\n\\nAssistant: `, and `answers`, each
with `answer`, `model` and `rank`, 1 for the best. The paper takes "1,000 queries randomly sampled from Nectar" with
seed 42 and does not say more. Here the rows get a random order, and the first usable ones are taken (`sample_rows`).
"""

import hashlib
import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from rankbuffer_trl.data import DataError, prompt_faults, text_fault
from rankbuffer_trl.decoding import excerpt
from rankbuffer_trl.groups import Messages

RANKS = 7
ROLE_OF = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")  # after an empty line; elsewhere these words are text


class Unusable(ValueError):
    """The error for a query that is left out. Its text is the reason, in the same words for all queries."""


def parse_prompt(text: str) -> Messages:
    """Read Nectar's prompt as messages, of which the last is the user's.

    Raises:
        [`Unusable`]: if it is not a conversation whose next turn is the assistant's.
    """
    before, *parts = TURN.split(text.removeprefix("\ufeff").replace("\r\n", "\n"))
    if not parts:
        raise Unusable("the prompt has no turn of a Human")
    if before.strip():
        raise Unusable("the prompt has text before its first turn")
    messages = [
        {"role": ROLE_OF[name], "content": content.strip()}
        for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if any(message["role"] != ("user", "assistant")[i % 2] for i, message in enumerate(messages)):
        raise Unusable("the prompt's turns do not alternate")
    if messages[-1]["role"] == "assistant":
        if messages[-1]["content"]:
            raise Unusable("the prompt ends in an assistant turn")
        messages.pop()  # Nectar ends each prompt with `Assistant: `
    if not all(message["content"] for message in messages):
        raise Unusable("the prompt has an empty turn")
    return messages


def to_row(raw: dict) -> dict:
    """Turn a row of Nectar into a row of a training set, without rubrics. Else raise [`Unusable`]."""
    if raw["prompt"] is None or raw["answers"] is None:
        raise Unusable("prompt or answers are missing")
    if text_fault(raw["prompt"]):
        raise Unusable("the prompt is empty or is not clean text")
    messages = parse_prompt(raw["prompt"])
    for _, problem, _ in prompt_faults(messages):  # the next step would refuse the whole set
        raise Unusable(f"the prompt {problem}")
    answers = raw["answers"]
    if len(answers) != RANKS:
        raise Unusable(f"not {RANKS} responses")
    if sorted(answer["rank"] or 0 for answer in answers) != list(range(1, RANKS + 1)):
        raise Unusable(f"the ranks are not 1 to {RANKS}, each once")
    answers = sorted(answers, key=lambda answer: -answer["rank"])  # rank 1 is the best
    if any(text_fault(answer["answer"]) for answer in answers):
        raise Unusable("a response is empty or is not clean text")
    responses = [answer["answer"].replace("\r\n", "\n").strip() for answer in answers]
    if len(set(responses)) < RANKS:
        raise Unusable("two responses are the same")
    return {
        "query_id": "nectar-" + hashlib.sha256(raw["prompt"].encode()).hexdigest()[:16],
        "prompt": messages,
        "responses": responses,  # from worst to best
        "models": ["unknown" if text_fault(answer["model"]) else answer["model"] for answer in answers],
    }


def check_schema(raw: dict, number: int) -> None:
    """Check that a row has Nectar's columns, and that its values have Nectar's types. Values may be missing.

    Raises:
        [`DataError`]: naming what was expected and what was found.
    """

    def fail(what: str) -> NoReturn:
        raise DataError(
            f"row {number} does not have Nectar's schema: {what}. Expected are prompt (text) and answers (a list of"
            " {answer: text, model: text, rank: number})"
        )

    for column in ("prompt", "answers"):
        if column not in raw:
            fail(f"there is no column {column!r}; the columns are {list(raw)}")
    if not isinstance(raw["prompt"], str | None):
        fail(f"prompt is {excerpt(raw['prompt'])}")
    if not isinstance(raw["answers"], list | None):
        fail(f"answers is {excerpt(raw['answers'])}")
    for i, answer in enumerate(raw["answers"] or ()):
        if not isinstance(answer, dict):
            fail(f"answers[{i}] is {excerpt(answer)}")
        for key, kind in (("answer", str), ("model", str), ("rank", int | float)):
            if key not in answer:
                fail(f"answers[{i}] has no {key!r}; it has {list(answer)}")
            if not isinstance(answer[key], kind | None) or isinstance(answer[key], bool):
                fail(f"answers[{i}].{key} is {excerpt(answer[key])}")


@dataclass(frozen=True)
class Sample:
    """The rows that were taken, and the reasons why others were not."""

    rows: list[dict]  # of the training set, in the random order
    read: int  # rows of the source
    dropped: dict[str, int] = field(default_factory=dict)  # by reason, before the last one taken

    @property
    def looked_at(self) -> int:
        """The number of queries that were looked at to find these rows."""
        return len(self.rows) + sum(self.dropped.values())


def place_of(prompt: str | None, seed: int) -> int:
    """Return the prompt's sort key, a hash of seed and text."""
    # Neither the order of files nor streaming changes the sample.
    return int.from_bytes(hashlib.sha256(f"{seed} {prompt}".encode(errors="surrogatepass")).digest())


def sample_rows(
    raws: Iterable[dict], n: int | None, seed: int | None, fault: Callable[[dict], str | None] = lambda row: None
) -> Sample:
    """Put all rows in random order and take the first `n` usable ones, in one pass that keeps `n` rows in memory.

    Args:
        n (`int`, *optional*):
            Number of rows to take, at least 1. `None` takes all usable rows.
        seed (`int`, *optional*):
            Seed of the random order. `None` keeps the order of the rows, which are shuffled already.
        fault (`Callable[[dict], str | None]`, *optional*):
            Returns why a finished row must be left out, or `None`.

    Raises:
        [`DataError`]: if a row does not have Nectar's schema.
    """
    taken: list[tuple[int, dict]] = []  # a heap with the last in the random order on top
    prompts: set[int] = set()
    drops: list[tuple[int, str]] = []
    read = 0
    for number, raw in enumerate(raws):
        read += 1
        check_schema(raw, number)
        prompt = place_of(raw["prompt"], seed or 0)
        place = number if seed is None else prompt
        full = n is not None and len(taken) >= n
        if full and place > -taken[0][0]:  # it cannot be among the first `n`
            continue
        try:
            if prompt in prompts:
                raise Unusable("the same prompt as an earlier row")
            row = to_row(raw)
            if reason := fault(row):
                raise Unusable(reason)
        except Unusable as reason:
            drops.append((place, str(reason)))
            continue
        prompts.add(prompt)
        if full:
            heapq.heapreplace(taken, (-place, row))
        else:
            heapq.heappush(taken, (-place, row))
    last = -taken[0][0] if taken and len(taken) == n else math.inf
    # One pass also drops rows that nobody would have looked at.
    reasons = Counter(reason for place, reason in drops if place <= last)
    rows = [row for _, row in sorted(taken, key=lambda item: -item[0])]
    return Sample(rows, read, dict(reasons.most_common()))
