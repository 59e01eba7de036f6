"""Read a file of rows line by line and list what is wrong with it, as `rankbuffer-data check` does.

Training reads a whole file at once. One type is then chosen for each column, so that a weight of 2.5 in one row turns
the weights of all rows into numbers with a decimal point. A fault is therefore looked for in the lines themselves.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankbuffer_trl.data import FILE_BUILDERS, check_columns, iterate, load_queries, normal_row, row_faults
from rankbuffer_trl.decoding import excerpt


def list_faults(name: str, split: str) -> Iterator[str]:
    """Yield the faults of all rows, one line of text each, in the order of the rows.

    The data set is a `.jsonl`, `.json` or `.parquet` file, a folder of them, or on the Hub.

    Raises:
        [`DataError`]: if the data set is missing or of another kind.
    """
    columns: dict[str, None] = {}  # in their order
    for _, row, fault in rows_of(name, split):
        columns |= {} if fault else dict.fromkeys(row)
        if fault or "prompt" in columns:
            break
    else:
        check_columns(list(columns), ["prompt"] if columns else [])  # once, not for each row
    seen: dict[str, str] = {}
    for place, row, fault in rows_of(name, split):
        if fault:
            yield f"{place}: {fault}"
        else:
            # The command counts rows without rubrics or responses.
            yield from row_faults(normal_row(row), place, seen, rubrics_needed=False)


def rows_of(name: str, split: str) -> Iterator[tuple[str, Any, str]]:
    """Yield place, row and, if the row cannot be read or is no object, the fault. Lines and rows count from 1."""
    path = Path(name)
    if FILE_BUILDERS.get(path.suffix) == "json" and path.is_file() and split == "train":
        for place, row, fault in json_rows(path):
            yield place, row, fault or ("" if isinstance(row, dict) else f"must be a JSON object, got {excerpt(row)}")
    else:
        for number, row in enumerate(iterate(load_queries(name, split=split)), start=1):
            yield f"row {number}", row, ""


def json_rows(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the rows of a file of JSON lines, or of one JSON list."""
    with path.open("rb") as file:
        start = file.read(1024)
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        if not start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            for number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n"):  # an empty line is no row
                    yield f"line {number}", *parse_or_fault(line.rstrip())
            return
        rows, fault = parse_or_fault(file.read())
    if fault:
        yield path.name, None, fault
    for number, row in enumerate(rows or (), start=1):
        yield f"row {number}", row, ""


def parse_or_fault(text: bytes) -> tuple[Any, str]:
    """Return the value of a JSON text after the start of a file, or `None` and the fault."""
    try:
        if text.startswith(codecs.BOM_UTF8):
            return None, "begins with a byte order mark, which may stand at the start of a file alone: remove it"
        return json.loads(text.decode()), ""
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1} is 0x{text[error.start]:02x}"
        return None, f"is not UTF-8 ({where}): save the file as UTF-8"
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        return None, f"is not JSON ({error.msg} at {where})"
    except ValueError:  # of `int`, which reads no more than 4,300 digits
        return None, "is not JSON that can be read (it has a number of too many digits)"
    except RecursionError:
        return None, "is not JSON that can be read (it is nested too deeply)"
