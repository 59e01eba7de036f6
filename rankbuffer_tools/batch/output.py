"""Write data sets whole or not at all, and record in a second file how they were made."""

import json
import os
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, TypedDict

from datasets import Dataset
from pyarrow import ArrowException

from rankbuffer_trl.data import DataError
from rankbuffer_trl.decoding import read_json_as
from rankbuffer_trl.files import replacing, write_whole

OUTPUT_SUFFIXES = (".jsonl", ".parquet")


def check_output(path: str | None, source: str | None = None) -> Path:
    """Check that a data set can be written to a path, make its folder, and return the path.

    Raises:
        [`DataError`]: if the path is not set, has another suffix, is a folder, is the source itself or lies in it.
    """
    if not path or Path(path).suffix not in OUTPUT_SUFFIXES:
        raise DataError(f"output_file must end in {' or '.join(OUTPUT_SUFFIXES)}, got {path!r}")
    if source and same_file(path, source):
        raise DataError(f"output_file={path} is the file dataset_name={source}, which would be lost: name another one")
    if source and Path(source).is_dir() and Path(path).resolve().is_relative_to(Path(source).resolve()):
        raise DataError(f"output_file={path} lies in dataset_name={source}, whose files are read: name another folder")
    if Path(path).is_dir():
        raise DataError(f"output_file={path} is a folder: name a file")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"the folder of output_file={path} cannot be made: {error}") from error
    return Path(path)


def same_file(written: str | Path, read: str | Path) -> bool:
    """Return whether both are one file that exists, by whatever name or link."""
    # To write it would lose what is read.
    return Path(written).is_file() and Path(read).is_file() and Path(written).samefile(read)


def beside(path: Path, what: str) -> Path:
    """Return the path of a file that belongs to the data set `path`, such as `<path>.provenance.json`."""
    return path.with_name(f"{path.name}.{what}")


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Write rows as JSON lines or Parquet, depending on the suffix of `path`.

    Raises:
        [`DataError`]: if the format has no form of a value, as JSON has none of bytes.
    """
    with replacing(path) as draft:
        write_as(path.suffix, draft, rows)


def try_write(path: Path, rows: Iterable[dict]) -> None:
    """Raise the [`DataError`] that `write_rows` would raise, before answers for these rows are paid for."""
    write_as(path.suffix, Path(os.devnull), rows)


def write_as(suffix: str, path: Path, rows: Iterable[dict]) -> None:
    """Write rows in the format of a suffix into a file."""
    if suffix == ".parquet":
        rows = list(rows)
        columns = dict.fromkeys(key for row in rows for key in row)  # `from_list` takes those of the first row
        try:
            Dataset.from_list([{key: row.get(key) for key in columns} for row in rows]).to_parquet(str(path))
        except (ArrowException, OverflowError) as error:
            raise DataError(f"Parquet cannot hold these rows ({error}): name an output_file of .jsonl") from error
        return
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False, default=as_text) + "\n")


def as_text(value: Any) -> str:
    """Return a value of a column of the user's own that JSON does not have, or raise [`DataError`]."""
    if isinstance(value, date | time | timedelta | Decimal):  # `datetime` is a date
        return str(value)
    raise DataError(f"a column has {type(value).__name__}, which JSON has not: name an output_file of .parquet")


def write_failures(path: Path, failures: dict[str, str]) -> None:
    """List failed queries with their causes in `<path>.failed.jsonl`, or remove that file if there are none."""
    failed = beside(path, "failed.jsonl")
    if failures:
        write_rows(failed, ({"query_id": query_id, "error": error} for query_id, error in failures.items()))
    else:
        failed.unlink(missing_ok=True)  # an older list would name queries that are in the set now


def source_name(dataset_name: str) -> str:
    """Return the name of a data set or tokenizer for the record: the last part of a path."""
    path = Path(dataset_name)
    return path.absolute().name if path.exists() else dataset_name  # records are pushed, and a path tells of a machine


class ProvenanceStep(TypedDict):
    """A step that made a data set: its name, and its settings, seed, counts and cost."""

    step: str


class Provenance(TypedDict):
    """The content of `<path>.provenance.json`."""

    steps: list[ProvenanceStep]


def read_provenance(path: str | Path) -> list[dict[str, Any]]:
    """Read the steps that made a data set; return an empty list if there is no record of them."""
    record = beside(Path(path).absolute(), "provenance.json")  # `.` has no name
    if not record.is_file():
        return []
    try:
        return [dict(step) for step in read_json_as(record, Provenance)["steps"]]
    except ValueError as error:
        raise DataError(f"{record.parent}: {error}; delete that record to continue without it") from error


def write_provenance(path: Path, steps: list[dict]) -> None:
    """Write the steps that made a data set to `<path>.provenance.json`."""
    write_whole(beside(path, "provenance.json"), json.dumps({"steps": steps}, indent=2, ensure_ascii=False) + "\n")
