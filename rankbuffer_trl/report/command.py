"""The command `rankbuffer-report`: a page, charts and tables from the stores of runs, while they run or after."""

import argparse
import json
import sys
from pathlib import Path

from datasets import disable_progress_bars

from ..data.queries import DataError, QueryTable, load_queries
from ..judge.config import JudgeConfig
from ..store import StoreError
from .report import write_report


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="rankbuffer-report", description=__doc__)
    parser.add_argument(
        "run_dir", nargs="+", type=Path, help="output folder of a run, a checkpoint of it, or a store file"
    )
    parser.add_argument("--output", type=Path, help="folder to write to; by default _report in the first run's")
    parser.add_argument("--dataset_name", help="the runs' data set, for prompts, rubrics and a quality curve")
    parser.add_argument("--dataset_config", help="configuration of a data set on the Hub")
    parser.add_argument("--dataset_train_split", default="train", help="its split")
    parser.add_argument("--step", type=int, help="step of the advantage chart; by default the last one in all runs")
    parser.add_argument("--scores", type=Path, help="JSON file, {run: score}, to hold against judging cost")
    parser.add_argument("--text_limit", type=int, default=4000, help="characters of a response that the page keeps")
    parser.add_argument(
        "--judge_prompt_price", type=float, help="of a million prompt tokens, to show the judge's cost"
    )
    parser.add_argument("--judge_completion_price", type=float, help="of a million completion tokens")
    return parser


def main() -> None:
    """The command `rankbuffer-report`."""
    arguments = make_parser().parse_args()
    if not sys.stderr.isatty():
        disable_progress_bars()
    first = arguments.run_dir[0]
    output = arguments.output or (first.parent if first.is_file() else first) / "_report"
    try:
        queries = None
        if arguments.dataset_name:
            name, config, split = arguments.dataset_name, arguments.dataset_config, arguments.dataset_train_split
            queries = QueryTable(load_queries(name, config, split))
        scores = json.loads(arguments.scores.read_text()) if arguments.scores else None
        prices = JudgeConfig(
            judge_prompt_price=arguments.judge_prompt_price, judge_completion_price=arguments.judge_completion_price
        )
        page = write_report(arguments.run_dir, output, queries, arguments.step, scores, arguments.text_limit, prices)
    except (StoreError, DataError, OSError, ValueError) as error:
        sys.exit(f"rankbuffer-report: {error}")
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB), charts and tables beside it.")
