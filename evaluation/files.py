"""Files of outputs and results, which a kill cannot leave half written."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.files import replacing

from .benchmark import OutputError, shortened

FAILED_JUDGMENTS = "failures.json"


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    A lone surrogate, which a model may write, becomes a question mark.
    """
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
    """Return the value of a JSON file.

    Raises:
        [`OutputError`]: if it is not JSON.
        `FileNotFoundError`: if it is missing.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OutputError(
            f"{path} is not valid JSON ({error}). Is it half a file? Delete it, and the next run writes it again"
        ) from None


def read_jsonl(path: Path) -> Iterator[dict]:
    """Yield the rows of a file of JSON lines.

    Raises:
        [`OutputError`]: naming the line that is not an object, or not UTF-8.
        `FileNotFoundError`: if the file is missing.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line.decode())
            except ValueError as error:
                row, fault = None, str(error)
            else:
                fault = f"it holds a {type(row).__name__}, not an object"
            if not isinstance(row, dict):
                raise OutputError(
                    f"{path}, line {number}: {fault}. Is it half a file? Delete it, and the next run writes it again"
                ) from None
            yield row


def file_name(label: str) -> str:
    """Return a model's or judge's name as one part of a path."""
    return label.replace("/", "__")


def write_failed_judgments(folder: Path, failures: Mapping[str, str]) -> None:
    """Write the cause of each judgment that failed.

    The official result formats leave such rows out, so the causes are in a separate file.
    """
    write_json(folder / FAILED_JUDGMENTS, dict(failures))


def read_failed_judgments(folder: Path) -> dict[str, str]:
    """Return the cause of each judgment that failed, by key.

    Raises:
        [`OutputError`]: if the judging has not finished yet.
    """
    try:
        return read_json(folder / FAILED_JUDGMENTS)
    except FileNotFoundError:
        raise OutputError(f"{folder / FAILED_JUDGMENTS} is missing: judge the outputs first") from None


def check_rows(found: Sequence[str], expected: Collection[str], dropped: Collection[str], where: Path) -> None:
    """Check that a result file has one row for each prompt except the dropped ones.

    Raises:
        [`OutputError`]: naming the rows that are missing, duplicated or unknown.
    """
    counts = Counter(found)
    for keys, fault in (
        ([key for key in expected if key not in counts and key not in dropped], "have no verdict"),
        ([key for key, count in counts.items() if count > 1], "are judged several times"),
        ([key for key in counts if key not in expected or key in dropped], "should not be there"),
    ):
        if keys:
            raise OutputError(f"{where}: {len(keys)} of {len(expected)} rows {fault}: {shortened(keys)}. Judge again")
