"""Files of outputs and results, which a kill cannot leave half written."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.files import write_whole

from .benchmark import OutputError, shortened

FAILED_JUDGMENTS = "failures.json"
GZIP = b"\x1f\x8b"
REWRITTEN = "Is it half a file? Delete it, and the next run writes it again"
BROUGHT = (
    "Is it half a file? If a run wrote it, delete it, and the next run writes it again; else write all outputs of the"
    " model into it, as the benchmark's JSON in UTF-8"
)
"""What to do about a file of outputs, which may come from elsewhere."""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """Write a file of JSON lines whole or not at all."""
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_text(path: Path, hint: str) -> str:
    """Return the text of a file of JSON in UTF-8, UTF-16 or UTF-32, with or without a byte order mark and gzip.

    Raises:
        [`OutputError`]: if it is none, with `hint` as the advice. A missing file is a `FileNotFoundError`.
    """
    content = path.read_bytes()  # outputs from elsewhere come in UTF-16 or gzip too
    try:
        if content.startswith(GZIP):
            content = gzip.decompress(content)
        return content.decode(json.detect_encoding(content))
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OutputError(f"{path} cannot be read ({error}). {hint}") from None


def read_json(path: Path, hint: str = REWRITTEN) -> Any:
    """Return the value of a JSON file. See [`read_text`] for `hint` and errors."""
    try:
        return json.loads(read_text(path, hint))
    except (ValueError, RecursionError) as error:
        if isinstance(error, OutputError):  # it is a `ValueError` too
            raise
        raise OutputError(f"{path} is not valid JSON ({error}). {hint}") from None


def read_jsonl(path: Path, hint: str = REWRITTEN) -> Iterator[dict]:
    """Yield the objects of a file of JSON lines. See [`read_text`] for `hint` and errors."""
    # `splitlines` would also split at U+2028 inside a text.
    for number, line in enumerate(read_text(path, hint).split("\n"), start=1):
        if not line.strip():  # other programs leave blank lines
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            row, fault = None, str(error)
        else:
            fault = f"it holds a {type(row).__name__}, not an object"
        if not isinstance(row, dict):
            raise OutputError(f"{path}, line {number}: {fault}. {hint}")
        yield row


def file_name(label: str) -> str:
    """Return a model's or judge's name as one part of a path."""
    return label.replace("/", "__")  # a judge's name on the Hub holds a slash


def write_failed_judgments(folder: Path, failures: Mapping[str, str]) -> None:
    """Write the cause of each judgment that failed."""
    write_json(folder / FAILED_JUDGMENTS, dict(failures))  # apart, since the official formats leave such rows out


def read_failed_judgments(folder: Path) -> dict[str, str]:
    """Return the cause of each judgment that failed, by key. Before the judging is done, raise [`OutputError`]."""
    try:
        return read_json(folder / FAILED_JUDGMENTS)
    except FileNotFoundError:
        raise OutputError(f"{folder / FAILED_JUDGMENTS} is missing: judge the outputs first") from None


def check_rows(keys: Sequence[str], expected: Collection[str], dropped: Collection[str], where: Path) -> None:
    """Check that a result file has one row for each prompt except the dropped ones, else raise [`OutputError`]."""
    counts = Counter(keys)
    for keys, fault in (
        ([key for key in expected if key not in counts and key not in dropped], "have no verdict"),
        ([key for key, count in counts.items() if count > 1], "are judged several times"),
        ([key for key in counts if key not in expected or key in dropped], "should not be there"),
    ):
        if keys:
            raise OutputError(f"{where}: {len(keys)} of {len(expected)} rows {fault}: {shortened(keys)}. Judge again")
