"""The command `rankbuffer-report`: a page, charts and tables from the stores of runs, during training or after it."""

import argparse
import sys
from pathlib import Path

from rankbuffer_trl.data import QueryTable, load_queries
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import Endpoint
from rankbuffer_trl.settings import check_at_least
from rankbuffer_trl.store import report_folder

from ..batch.recipes import KeyParser
from ..terminal import prepare_terminal
from .report import BROWSER_MB, write_report


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = KeyParser(prog="rankbuffer-report", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "run_dir", nargs="+", type=Path, help="output folder of a run, one of its checkpoints, or a store file"
    )
    parser.add_argument(
        "--output", type=Path, help="folder to write to; default: _report in the folder of the first run"
    )
    parser.add_argument("--dataset_name", help="data set of the runs, for prompts, rubrics and a quality curve")
    parser.add_argument("--dataset_config", help="configuration of a data set on the Hub")
    parser.add_argument("--dataset_train_split", default="train", help="split of the data set")
    parser.add_argument(
        "--step", type=int, help="step of the advantage chart; default: the last one that all runs have"
    )
    parser.add_argument(
        "--evaluation", nargs="+", type=Path, default=[], help="output folders of evaluations, for the paper's tables"
    )
    parser.add_argument("--text_limit", type=int, default=4000, help="characters of a response that the page keeps")
    parser.add_argument(
        "--browser_mb",
        type=float,
        default=BROWSER_MB,
        help="megabytes of queries that the buffer browser of a run may have; it draws queries beyond them at random",
    )
    parser.add_argument(
        "--judge_prompt_price", type=float, help="price of a million prompt tokens, to show what the judge cost"
    )
    parser.add_argument("--judge_completion_price", type=float, help="price of a million completion tokens")
    parser.add_argument(
        "--judge_cached_price", type=float, help="price of a million cached prompt tokens; default: that of all others"
    )
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    prepare_terminal()
    output = arguments.output or report_folder(arguments.run_dir[0])  # next to the run, where no upload looks
    try:
        check_at_least(arguments, text_limit=0, browser_mb=0)
        queries = None
        if arguments.dataset_name:
            name, config, split = arguments.dataset_name, arguments.dataset_config, arguments.dataset_train_split
            queries = QueryTable(load_queries(name, config, split))
        named = ("prompt_price", "completion_price", "cached_price")
        prices = Endpoint(**{name: getattr(arguments, f"judge_{name}") for name in named})
        options = arguments.step, arguments.evaluation, arguments.text_limit, prices.price, arguments.browser_mb
        page = write_report(arguments.run_dir, output, queries, *options)
    except (RankBufferError, OSError) as error:
        sys.exit(f"rankbuffer-report: {error}")
    except KeyboardInterrupt:
        sys.exit("rankbuffer-report: interrupted")
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB), with charts and tables in its folder.")


if __name__ == "__main__":
    main()
