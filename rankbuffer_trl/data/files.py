"""Data sets on the disk: whole or not at all, and with the report of how they were made beside them."""

import json
from collections.abc import Iterable
from pathlib import Path

from datasets import Dataset

from ..files import replacing
from .queries import DataError

KINDS = (".jsonl", ".parquet")


def check_output(path: str | None, source: str | None = None) -> Path:
    """The path of a data set to be written.

    Args:
        path (`str`, *optional*):
            What the user named.
        source (`str`, *optional*):
            The data set that is read.

    Raises:
        [`DataError`]: if it is not named, is of another kind or the source itself, or its folder cannot be made.
    """
    if not path or Path(path).suffix not in KINDS:
        raise DataError(f"output_file must end in {' or '.join(KINDS)}, got {path!r}")
    if source and Path(source).is_file() and Path(path).exists() and Path(path).samefile(source):
        raise DataError(f"output_file={path} is the file dataset_name={source}, which would be lost: name another one")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder of output_file={path} cannot be made: {error}") from error
    return Path(path)


def beside(path: Path, what: str) -> Path:
    """A file that belongs to the data set `path`: its `report.json`, `failed.jsonl` or `answers.jsonl`."""
    return path.with_name(f"{path.name}.{what}")


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write rows as JSON lines or Parquet, by the path's suffix."""
    with replacing(path) as draft:
        if path.suffix == ".parquet":
            rows = list(rows)
            columns = dict.fromkeys(key for row in rows for key in row)  # `from_list` takes those of the first row
            Dataset.from_list([{key: row.get(key) for key in columns} for row in rows]).to_parquet(str(draft))
            return
        with draft.open("w", encoding="utf-8") as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_failures(path: Path, failures: dict[str, str]) -> None:
    """List failed queries with their causes in `<path>.failed.jsonl`, or remove that file if there are none."""
    failed = beside(path, "failed.jsonl")
    if failures:
        write_rows(failed, ({"query_id": query_id, "error": error} for query_id, error in failures.items()))
    else:
        failed.unlink(missing_ok=True)


def source_name(dataset_name: str) -> str:
    """What a report calls a data set or tokenizer: a path by its last part, since reports are pushed to the Hub."""
    path = Path(dataset_name)
    return path.absolute().name if path.exists() else dataset_name


def read_report(path: str | Path) -> list[dict]:
    """The steps that made a data set, from its report; none if it has no report.

    Raises:
        [`DataError`]: if the report cannot be read.
    """
    report = beside(Path(path), "report.json")
    if not report.is_file():
        return []
    try:
        return json.loads(report.read_text(encoding="utf-8"))["steps"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"the report {report} cannot be read ({error}); delete it to go on without it") from error


def write_report(path: Path, steps: list[dict]) -> None:
    """Write the steps that made a data set beside it."""
    with replacing(beside(path, "report.json")) as draft:
        draft.write_text(json.dumps({"steps": steps}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
