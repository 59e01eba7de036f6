"""WildBench v2's files: conversations, and the outputs of models."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import read_table

from .assets import AssetError
from .benchmark import OutputError, shortened
from .wildbench_prompts import Conversation
from .wildbench_scores import groups_of


def read_conversations(path: Path) -> dict[str, Conversation]:
    """The benchmark's rows by session, in official order.

    Raises:
        [`AssetError`]: naming the row that is not as it should be.
    """
    conversations: dict[str, Conversation] = {}
    for number, row in enumerate(read_parquet(path)):
        try:
            conversation = read_conversation(row)
            if conversation.session_id in conversations:
                raise ValueError(f"the session {conversation.session_id!r} is there twice")
        except (LookupError, TypeError, ValueError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise AssetError(f"{path}, row {number}, is no row of WildBench v2 ({fault})") from None
        conversations[conversation.session_id] = conversation
    return conversations


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """One row of the data set.

    Raises:
        `ValueError`: if its ids disagree (the official tables take one for the other), if it has an unknown tag, or if
            its last turn is not the user's.
        `LookupError` or `TypeError`: if something is missing.
    """
    session = row["session_id"]
    if row.get("id", session) != session:
        raise ValueError(f"its id is {row['id']!r} and its session_id {session!r}")
    turns = tuple((turn["role"], turn["content"]) for turn in row["conversation_input"])
    if not turns or turns[-1][0] != "user":
        raise ValueError("its last turn is not the user's")
    tags = (row["primary_tag"], *row["secondary_tags"])
    return Conversation(session, turns, tuple(row["checklist"]), tags, groups_of(tags))


def read_outputs(rows: Any, where: Path) -> Iterator[tuple[Any, Any]]:
    """(session, text) of the official output format, in which an output is a list whose first text counts.

    Raises:
        [`OutputError`]: if it is not that format.
    """
    if not isinstance(rows, list):
        raise OutputError(f"{where} must hold a list of outputs, not a {type(rows).__name__}")
    for number, row in enumerate(rows):
        try:
            output = row["output"]
            yield row["session_id"], output[0] if isinstance(output, list) else output
        except (LookupError, TypeError) as error:
            raise OutputError(f"{where}, row {number}, is no output of WildBench ({error!r})") from None


def read_reference(path: Path, sessions: Iterable[str]) -> dict[str, str]:
    """The outputs of a reference model by session.

    Raises:
        [`AssetError`]: if the file is no output file, or lacks one of `sessions`.
    """
    try:
        texts = dict(read_outputs(read_parquet(path), path))
    except OutputError as fault:
        raise AssetError(str(fault)) from None
    if missing := [session for session in sessions if not isinstance(texts.get(session), str)]:
        raise AssetError(f"{path} lacks the outputs of {len(missing)} sessions: {shortened(missing)}")
    return texts


def read_parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of the Hub.

    Raises:
        [`AssetError`]: if it is not Parquet.
    """
    try:
        return read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise AssetError(f"{path} is not a Parquet file ({error}). Is it whole?") from None
