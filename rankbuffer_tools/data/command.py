"""The command `rankbuffer-data`: check a training set, and show its data card.

rankbuffer-data check FILE
rankbuffer-data card FILE NAME
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path

from rankbuffer_trl.data import CHECK_HINT, DataError, checked_rows, load_queries, select, warn_of_columns
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.rewards import RewardMethod, find_method, load_method
from rankbuffer_trl.settings import check_at_least, described

from ..batch.output import read_provenance
from ..batch.recipes import KeyParser
from ..terminal import prepare_terminal
from .check import CheckSettings, check_dataset, not_ready, print_findings
from .lines import list_faults
from .publish import make_card
from .tokens import TokenCounter

MAX_FAULTS = 20  # that `check` prints
SETTINGS = ("k0", "max_prompt_length", "max_completion_length", "free_tokens", "sample")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command."""
    parser = KeyParser(prog="rankbuffer-data", description="Training sets for RankBuffer.")
    commands = parser.add_subparsers(dest="command", required=True)

    look = commands.add_parser(
        "check",
        help="check every row; print counts, lengths, duplicates, judge context; exit with 1 if a run cannot start",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    look.add_argument("file", help=".jsonl, .json or .parquet file, or a data set on the Hub")
    look.add_argument("--split", default="train", help="split of a data set on the Hub")
    look.add_argument("--tokenizer", help="name or path of a tokenizer; without it, 3 characters count as a token")
    look.add_argument("--no_guard", action="store_true", help="judge_guard: false, the paper's prompts")
    look.add_argument(
        "--no_responses",
        action="store_true",
        help="the run needs no reference responses, as with method_args: {bootstrap: true}",
    )
    for name in SETTINGS:
        what = described(CheckSettings)[name][1]
        look.add_argument(f"--{name}", type=int, default=getattr(CheckSettings, name), help=what)
    look.add_argument("--num_generations", type=int, default=8, help="rollouts of a group")
    look.add_argument("--method", default="rankbuffer", help="the reward method, which says how long its prompts are")

    card = commands.add_parser("card", help="print the data card", allow_abbrev=False)
    card.add_argument("file", help=".jsonl, .json or .parquet file")
    card.add_argument("repo_id", help="<user>/<name> on the Hub")
    return parser


def run_command(arguments: argparse.Namespace) -> None:
    """Do what the command line says."""
    if arguments.command == "card":
        dataset = load_queries(arguments.file)
        rows = list(checked_rows(dataset, rubrics_needed="rubrics" in dataset.column_names))
        name = f"train{Path(arguments.file).suffix}"
        print(make_card(arguments.repo_id, name, rows, read_provenance(arguments.file)), end="")
    else:
        check(arguments)


def check(arguments: argparse.Namespace) -> None:
    """List the faults of a data set. If it has none, measure it, and say whether a run can start.

    Raises:
        [`DataError`]: if the data set is not ready to train on.
        [`SettingsError`]: if a setting cannot work.
    """
    check_at_least(arguments, num_generations=2)
    values = {name: getattr(arguments, name) for name in SETTINGS}
    method = method_of(arguments)
    settings = CheckSettings(
        guard=not arguments.no_guard,
        most_shown=method.most_shown(arguments.num_generations),
        responses_needed=0 if arguments.no_responses else method.responses_needed,
        **values,
    )
    tokens = TokenCounter(arguments.tokenizer)
    faults = list_faults(arguments.file, arguments.split)
    listed = list(islice(faults, MAX_FAULTS))
    if listed:
        print(*listed, sep="\n")
        count = len(listed) + sum(1 for _ in faults)
        above = f" The first {MAX_FAULTS} are listed above." if count > MAX_FAULTS else ""
        raise DataError(f"{arguments.file} is not ready. Faults: {count:,}.{above}")
    dataset = load_queries(arguments.file, split=arguments.split)
    columns = ["prompt"] + [c for c in ("rubrics", "responses", "models") if c in dataset.column_names]
    warn_of_columns(dataset)
    dataset = select(dataset, columns)  # other columns are the user's own
    rows = enumerate(checked_rows(dataset, rubrics_needed=False), start=1)
    tokens.check({**row, "place": f"row {number}"} for number, row in rows)
    findings = check_dataset(dataset, tokens, settings)
    print_findings(arguments.file, findings, tokens, settings)
    if any(not_ready(findings, tokens, settings)):
        raise DataError(f"{arguments.file} is not ready, for the reasons above")


def method_of(arguments: argparse.Namespace) -> RewardMethod:
    """Return the reward method that `check` estimates for."""
    names = {field.name for field in fields(find_method(arguments.method))}
    # Not every method has anchors.
    return load_method(arguments.method, {"k0": arguments.k0} if "k0" in names else {}, seed=0)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = make_parser().parse_args(argv)
    prepare_terminal()
    try:
        run_command(arguments)
    except (RankBufferError, OSError) as error:
        sys.exit(
            f"rankbuffer-data: {str(error) if arguments.command == 'card' else str(error).replace(CHECK_HINT, '')}"
        )
    except KeyboardInterrupt:
        sys.exit("rankbuffer-data: interrupted")


if __name__ == "__main__":
    main()
