"""What the recipes of this folder share: a command line in, a data set with its report out."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars
from trl import TrlParser

from ..judge import JudgeError
from .files import beside, write_failures, write_report, write_rows
from .queries import DataError


def run(config_class: type, main: Callable[[Any], int]) -> None:
    """Read the settings, run `main`, and exit with its code. A fault that a user can mend ends in one line."""
    name = Path(sys.argv[0]).stem
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        (config,) = TrlParser((config_class,)).parse_args_and_config()
        code = main(config)
    except (DataError, JudgeError, ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted. Answers that were there are kept; the same command goes on from them")
    sys.exit(code)


def finish(path: Path, rows: list[dict], failures: dict[str, str], steps: list[dict]) -> int:
    """Write a data set, its failures and its report, say so, and give the exit code: 1 if a query failed.

    Where all have failed, what was there before stays.

    Args:
        path (`Path`):
            The data set.
        rows (`list[dict]`):
            Its rows.
        failures (`dict[str, str]`):
            Why queries are not among them, by id.
        steps (`list[dict]`):
            How it was made.
    """
    write_failures(path, failures)
    if rows:
        write_rows(path, rows)
        write_report(path, steps)
        print(f"{len(rows):,} queries in {path}, how they were made in {beside(path, 'report.json')}")
    if failures:
        query_id, cause = next(iter(failures.items()))
        print(
            f"{len(failures):,} queries failed and are NOT in it; they are listed in {beside(path, 'failed.jsonl')}."
            f" The first is {query_id!r}: {cause}. Run the same command again to ask these alone.",
            file=sys.stderr,
        )
    return 1 if failures else 0
