"""Files that a kill cannot leave half written."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rankbuffer_trl.files import replacing

from .benchmark import OutputError


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. Half a surrogate pair, which a model may write, becomes a question mark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="replace")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of JSON lines whole or not at all."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        [`OutputError`]: if it is not JSON.
        `FileNotFoundError`: if it is not there.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutputError(
            f"{path} is not valid JSON ({error}). Is it half a file? Delete it to have it made again"
        ) from None


def read_jsonl(path: Path) -> Iterator[dict]:
    """The rows of a file of JSON lines.

    Raises:
        [`OutputError`]: naming the line that is not an object.
        `FileNotFoundError`: if the file is not there.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                row, fault = None, str(error)
            else:
                fault = f"it holds a {type(row).__name__}, not an object"
            if not isinstance(row, dict):
                raise OutputError(
                    f"{path}, line {number}: {fault}. Is it half a file? Delete it to have it made again"
                ) from None
            yield row


def file_name(label: str) -> str:
    """A model's or judge's name as one part of a path."""
    return label.replace("/", "__")
