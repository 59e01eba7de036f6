"""Judgments that failed for good. Official result formats leave their rows out and say nothing; a file beside does."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from .benchmark import OutputError, shortened
from .files import read_json, write_json

FILE = "failures.json"


def write_failures(folder: Path, failures: Mapping[str, str]) -> None:
    """Note which judgments failed, and why."""
    write_json(folder / FILE, dict(failures))


def read_failures(folder: Path) -> dict[str, str]:
    """The cause by key of each judgment that failed.

    Raises:
        [`OutputError`]: if nothing was judged to its end yet.
    """
    try:
        return read_json(folder / FILE)
    except FileNotFoundError:
        raise OutputError(f"{folder / FILE} is missing: judge the outputs first") from None


def check_rows(found: Sequence[str], expected: Collection[str], dropped: Collection[str], where: Path) -> None:
    """Does a result file have one row for each prompt but the dropped ones?

    Raises:
        [`OutputError`]: naming the rows that are missing, there twice or unknown.
    """
    counts = Counter(found)
    for keys, fault in (
        ([key for key in expected if key not in counts and key not in dropped], "have no verdict"),
        ([key for key, count in counts.items() if count > 1], "are judged several times"),
        ([key for key in counts if key not in expected or key in dropped], "should not be there"),
    ):
        if keys:
            raise OutputError(f"{where}: {len(keys)} of {len(expected)} rows {fault}: {shortened(keys)}. Judge again")
