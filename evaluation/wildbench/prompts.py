"""WildBench v2's prompts and files: conversations, outputs, what the judge is asked, and how its answers are read.

The templates are read from a checkout of the official repository. All texts are inserted in one pass, so a placeholder
inside a response stays text.
"""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import read_table

from rankbuffer_trl.judge import VerdictError, fill, shorten_json

from ..assets import AssetError
from ..benchmark import OutputError, read_json_answer, shortened
from .scores import EMPTY, REWARDS, cut_words, groups_of, rating

MAX_WORDS = 1000  # of each text in a pairwise prompt; a scoring prompt shows whole texts

SPEAKERS = {"user": "USER", "assistant": "ASSISTANT"}


@dataclass(frozen=True)
class Conversation:
    """A row of WildBench v2."""

    session_id: str
    turns: tuple[tuple[str, str], ...]  # (role, text); the last is the user's, to be answered
    checklist: tuple[str, ...]  # criteria that a judge is told to look for
    tags: tuple[str, ...]  # the primary tag, then the secondary ones
    groups: tuple[str, ...]  # the groups of tasks in which it counts

    @property
    def history(self) -> str:
        """All turns but the last, as one text."""
        return "".join(f"{SPEAKERS[role]}: {text}\n\n" for role, text in self.turns[:-1] if role in SPEAKERS)

    @property
    def query(self) -> str:
        """The text of the last turn."""
        return self.turns[-1][1]

    @property
    def criteria(self) -> str:
        """The checklist as lines."""
        return "".join(f"- {item}\n" for item in self.checklist)


def scoring_prompt(template: str, conversation: Conversation, response: str) -> str:
    """Return the prompt that asks for a rating of `response`."""
    texts = {
        "{$history}": conversation.history,
        "{$user_query}": conversation.query,
        "{$model_output}": response,
        "{$checklist}": conversation.criteria,
    }
    return fill(template, texts)


def pairwise_prompt(template: str, conversation: Conversation, first: str, second: str) -> str:
    """Return the prompt that asks which of two responses is better. `first` is A. Both come from [`display`]."""
    texts = {
        "{$history}": cut_words(conversation.history, MAX_WORDS),
        "{$user_query}": cut_words(conversation.query, MAX_WORDS),
        "{$candidate_A}": first,
        "{$candidate_B}": second,
        "{$checklist}": conversation.criteria,
    }
    return fill(template, texts)


def display(response: str) -> str:
    """Return a response as a pairwise prompt shows it: cut after [`MAX_WORDS`], or a note that it is empty."""
    short = cut_words(response, MAX_WORDS)
    return short if short.strip() else EMPTY


def read_score(answer: str, cut_off: bool = False) -> dict[str, Any]:
    """Return a judge's answer whose `score` [`rating`] can read. Else raise [`VerdictError`]."""
    verdict = read_json_answer(answer, ["score"], cut_off)
    rating(verdict)  # raises, and the judge is asked again; official code drops the answer
    return verdict


def read_pairwise_choice(answer: str, cut_off: bool = False) -> dict[str, Any]:
    """Return a judge's answer whose `choice` is one of the five verdicts. Else raise [`VerdictError`]."""
    verdict = read_json_answer(answer, ["choice"], cut_off)
    if not isinstance(verdict["choice"], str) or verdict["choice"] not in REWARDS:
        raise VerdictError(f"`choice` must be one of {', '.join(REWARDS)}, not {shorten_json(verdict['choice'])}")
    return verdict


def positions(seed: int, sessions: Sequence[str]) -> dict[str, bool]:
    """Draw for each session whether the evaluated model is A."""
    generator = random.Random(seed)
    return {session: generator.random() < 0.5 for session in sessions}  # one draw a row, so the order of rows decides


def read_conversations(path: Path) -> dict[str, Conversation]:
    """Return the benchmark's rows by session, in official order. An [`AssetError`] names a malformed row."""
    conversations: dict[str, Conversation] = {}
    for number, row in enumerate(read_parquet(path)):
        try:
            conversation = read_conversation(row)
            if conversation.session_id in conversations:
                raise ValueError(f"the session {conversation.session_id!r} occurs twice")
        except (LookupError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise AssetError(f"{path}, row {number}, is no row of WildBench v2 ({fault})") from None
        conversations[conversation.session_id] = conversation
    return conversations


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Return one row of the data set as a conversation. For errors see [`read_conversations`]."""
    session = row["session_id"]
    if row.get("id", session) != session:  # the official tables use either
        raise ValueError(f"its id is {row['id']!r} and its session_id {session!r}")
    turns = tuple((turn["role"], turn["content"]) for turn in row["conversation_input"])
    if not turns or turns[-1][0] != "user":
        raise ValueError("its last turn is not the user's")
    tags = (row["primary_tag"], *row["secondary_tags"])
    return Conversation(session, turns, tuple(row["checklist"]), tags, groups_of(tags))


def output_texts(rows: Any, where: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (session, text) of the official output format, or raise [`OutputError`] if `rows` have another."""
    if not isinstance(rows, list):
        raise OutputError(f"{where} must hold a list of outputs, not a {type(rows).__name__}")
    for number, row in enumerate(rows):
        try:
            output = row["output"]
            # The official tables read the first text.
            yield row["session_id"], output[0] if isinstance(output, list) else output
        except (LookupError, TypeError) as error:
            raise OutputError(f"{where}, row {number}, is no output of WildBench ({error!r})") from None


def read_reference(path: Path, sessions: Iterable[str]) -> dict[str, str]:
    """Return the outputs of a reference model by session. An [`AssetError`] says which of `sessions` it lacks."""
    try:
        texts = dict(output_texts(read_parquet(path), path))
    except OutputError as fault:
        raise AssetError(str(fault)) from None
    if missing := [session for session in sessions if not isinstance(texts.get(session), str)]:
        raise AssetError(f"{path} lacks the outputs of {len(missing)} sessions: {shortened(missing)}")
    return texts


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file, or raise [`AssetError`]."""
    try:
        return read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise AssetError(f"{path} is not a Parquet file ({error}). Is it whole?") from None
