"""The command `rankbuffer-audit`: load a data set, ask the judge, measure, and write what was found."""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy as np
from datasets import disable_progress_bars

from ..data.queries import DataError, QueryTable, load_queries
from ..data.recipe import read_settings
from ..errors import RankBufferError, SettingsError
from ..groups import Query
from ..judge import Call
from ..judge.config import JudgeConfig
from .figure import audit_figure
from .measures import MEASURES
from .probes import ask_everything
from .results import Audit, Cost, Form
from .terminal import print_audit


@dataclass
class AuditConfig(JudgeConfig):
    r"""
    Configuration of the audit.

    It adds the parameters below to those of [`JudgeConfig`]. Of these, `judge_step_timeout` has no effect here, and
    `judge_max_failures` is only reported.

    Parameters:
        dataset_name (`str`):
            A training set with `responses`: a `.jsonl`, `.json` or `.parquet` file, or a data set on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        queries (`int`, *optional*, defaults to `20`):
            Number of queries to draw. A query with `n` responses takes `2n + 2` questions.
        pairwise_queries (`int`, *optional*, defaults to `5`):
            Number of these queries whose pairs are all asked, which takes `n (n - 1)` more questions each.
        output_dir (`str`, *optional*, defaults to `"runs/audit"`):
            Folder for `audit.json` and `audit.png`.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries drawn, the orders shown and the intervals.
    """

    dataset_name: str = field(
        default="",
        metadata={"help": "Training set with responses: a .jsonl, .json or .parquet file, or on the Hub."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set on the Hub."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to audit."})
    queries: int = field(default=20, metadata={"help": "Number of queries to draw."})
    pairwise_queries: int = field(default=5, metadata={"help": "Number of these queries whose pairs are all asked."})
    output_dir: str = field(default="runs/audit", metadata={"help": "Folder for audit.json and audit.png."})
    seed: int = field(default=0, metadata={"help": "Seed of the queries drawn, the orders shown and the intervals."})

    def __post_init__(self):
        super().__post_init__()
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
        if self.queries < 1:
            raise SettingsError(f"queries must be at least 1, got {self.queries}")
        if not 0 <= self.pairwise_queries <= self.queries:
            raise SettingsError(f"pairwise_queries must be in 0..queries={self.queries}, got {self.pairwise_queries}")

    def load(self) -> list[Query]:
        """Load the data set and draw queries, in random order.

        Raises:
            [`DataError`]: if the data set cannot be audited.
        """
        dataset = load_queries(self.dataset_name, self.dataset_config, self.dataset_train_split)
        if "responses" not in dataset.column_names:
            raise DataError(
                "the audit compares the judge with the data set's column 'responses' (worst to best), and there is"
                f" none in {self.dataset_name}: make it with recipes/generate_responses.py, and let a stronger judge"
                " than this one order the responses"
            )
        table = QueryTable(dataset, anchors_needed=2)
        drawn = random.Random(self.seed).sample(table.ids, min(self.queries, len(table)))
        return [table[query_id] for query_id in drawn]


def costs(calls: Sequence[Call]) -> list[Cost]:
    """Average what a call costs, by kind."""
    result = []
    for kind, of_kind in groupby(sorted(calls, key=lambda call: call.kind), key=lambda call: call.kind):
        group = list(of_kind)
        prompt, cached, completion = (fmean(column) for column in zip(*(call.spent for call in group), strict=True))
        median, slow = np.quantile([call.seconds for call in group], [0.5, 0.95]).tolist()
        result.append(Cost(kind, len(group), prompt, cached, completion, median, slow))
    return result


def form_of(calls: Sequence[Call]) -> Form:
    """Count the answers that were a valid verdict, and those that were not."""
    return Form(
        questions=len(calls),
        without_verdict=sum(call.failed for call in calls),
        unreachable=sum(call.outcome == "unreachable" for call in calls),
        first_answers=sum(call.outcome == "parsed" or call.malformed > 0 for call in calls),
        first_malformed=sum(call.malformed > 0 for call in calls),
    )


def audit(config: AuditConfig) -> Audit:
    """Load the data, ask the judge, and measure.

    Raises:
        [`DataError`]: if the data set cannot be audited.
        [`JudgeError`]: if the judge cannot be asked.
    """
    queries = config.load()
    judge = config.judge()
    started = time.perf_counter()
    verdicts, calls = asyncio.run(ask_everything(judge, queries, config.pairwise_queries, config.seed))
    seconds = time.perf_counter() - started
    return Audit(
        judge=judge.client.name,
        dataset=config.dataset_name,
        queries=len(queries),
        pairwise_queries=sum(bool(one.pairs) for one in verdicts),
        results=[measure.result(verdicts, config.seed) for measure in MEASURES],
        form=form_of(calls),
        costs=costs(calls),
        seconds=seconds,
        moves=[(one.n, place, p) for one in verdicts for place, p in enumerate(one.put_back) if p is not None],
        max_failures=config.judge_max_failures,
    )


def main() -> None:
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        config = read_settings(AuditConfig)
        found = audit(config)
        out = Path(config.output_dir)
        audit_figure(out / "audit.png", found)
        (out / "audit.json").write_text(
            json.dumps({"config": asdict(config), **found.as_dict()}, indent=2, allow_nan=False) + "\n"
        )
    except (RankBufferError, OSError) as error:
        sys.exit(f"rankbuffer-audit: {error}")
    print_audit(found)
    print(f"Numbers: {out / 'audit.json'}. Figure: {out / 'audit.png'}.")
