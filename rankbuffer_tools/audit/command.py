"""The command `rankbuffer-audit`: load samples of the policy, ask the judge, measure, and write the results."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

import numpy as np

from rankbuffer_trl.data import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import refuse_file, write_whole
from rankbuffer_trl.groups import RolloutGroup
from rankbuffer_trl.judge import Call, RubricJudge, Totals
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.settings import check_at_least, documented

from ..batch.script import announce, cost_line, run_script
from ..batch.server_check import estimate_tokens
from .card import DATASET, ROOT, SAMPLES, card_of, check_card, write_judge_card
from .figure import audit_figure
from .measures import MEASURES, rating_noise
from .results import Audit, Cost, Form
from .samples import FURTHER, ask_everything, insertions, length_questions, questions, read_rollouts
from .terminal import print_audit

RESULT = "audit.json"


@documented
@dataclass
class AuditConfig(JudgeConfig):
    r"""
    Configuration of the audit.

    It adds the parameters below to those of [`JudgeConfig`]. The audit reports `judge_max_failures`, and no failure
    stops it.

    Parameters:
        dataset_name (`str`):
            The training set, for prompts and rubrics: a `.jsonl`, `.json` or `.parquet` file, or on the Hub.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        samples (`str`):
            A file of eight responses of your policy per query, in any order: rows with `query_id` and `responses`.
        queries (`int`, *optional*, defaults to `50`):
            Number of queries to draw from the file of samples. A query with eight samples takes 22 questions. The
            first six queries take twelve more.
        probabilities (`bool`, *optional*, defaults to `True`):
            Read the probabilities behind ratings and pairs, too, if the judge's server gives them.
        card (`str`, *optional*):
            The name of the judge, for a card: `dataset_name` and `samples` are then those of `docs/judges.md`.
        output_dir (`str`, *optional*, defaults to `"runs/audit"`):
            Folder for `audit.json`, `audit.png` and the answers.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries drawn, the orders shown and the intervals.
    """

    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    samples: str = ""
    queries: int = 50
    probabilities: bool = True
    card: str | None = None
    output_dir: str = "runs/audit"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.card is not None:
            check_card(self.card)
            if self.dataset_name or self.samples:
                raise SettingsError("card takes the public set: leave out dataset_name and samples")
            # So that all cards are about the same questions.
            self.dataset_name, self.samples = str(ROOT / DATASET), str(ROOT / SAMPLES)
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
        if not self.samples:
            raise SettingsError(
                "samples is not set: name a file of eight responses of your policy per query, which"
                " `recipes/generate_responses.py --audit_queries 50 --responses 8` writes"
            )
        check_at_least(self, queries=1)
        refuse_file("output_dir", self.output_dir)

    @property
    def log(self) -> Path:
        """The file of the answers."""
        return Path(self.output_dir) / "answers.jsonl"

    def load(self) -> tuple[list[RolloutGroup], bool]:
        """Draw groups in random order, and return whether their samples are the data set's own references."""
        table = QueryTable(load_queries(self.dataset_name, self.dataset_config, self.dataset_train_split))
        groups = read_rollouts(self.samples, table)
        drawn = random.Random(self.seed).sample(list(groups), min(self.queries, len(groups)))
        references = all(
            {one.text for one in groups[query_id].rollouts} <= {*table.written(query_id)} for query_id in drawn
        )
        return [groups[query_id] for query_id in drawn], references


def costs(calls: Sequence[Call]) -> list[Cost]:
    """Average the cost of a call and count invalid answers, by kind of question."""
    result = []
    for kind, of_kind in groupby(sorted(calls, key=lambda call: call.kind), key=lambda call: call.kind):
        group = list(of_kind)
        prompt, cached, completion = (fmean(column) for column in zip(*(call.spent for call in group), strict=True))
        median, slow = np.quantile([call.seconds for call in group], [0.5, 0.95]).tolist()
        result.append(Cost(kind, form_of(group), prompt, cached, completion, median, slow))
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
    """Load the samples, ask the judge, and measure.

    Raises:
        [`DataError`]: if the data set or the samples cannot be used.
        [`JudgeError`]: if the judge cannot be asked.
    """
    judge = config.judge().client.name
    check_same_judge(Path(config.output_dir) / RESULT, judge)
    groups, references = config.load()
    planned = [one for group in groups for one in questions(group, config.seed, config.probabilities).values()]
    for group in groups[:FURTHER]:
        planned += length_questions(group, config.probabilities).values()
        planned += insertions(group, range(len(group.rollouts))).values()  # in another order, but of the same lengths
    tokens = estimate_tokens(planned, config.judge_guard, config.judge_samples)  # before anything is asked and paid
    if judge == RubricJudge.name:
        print(f"no judge is named, so this audits the {RubricJudge.name}: name yours with --judge_url or --recipe")
    announce(config.endpoint, f"{len(groups):,} queries", (len(planned), len(planned)), *tokens, config.log)

    verdicts, calls = asyncio.run(ask_everything(config.judge, groups, config.log, config.seed, config.probabilities))
    print(f"[price] asked in all: {cost_line(config.endpoint, Totals.of(calls))}")
    return Audit(
        judge=judge,
        dataset=config.dataset_name,
        samples=config.samples,
        references=references,
        rankings=verdicts,
        results=[measure.result(verdicts, config.seed) for measure in MEASURES],
        costs=costs(calls),
        moves=[(one.n, place, given) for one in verdicts for place, given in one.put_back if given is not None],
        max_failures=config.judge_max_failures,
        soft_noise=rating_noise(verdicts),
    )


def check_same_judge(result: Path, judge: str) -> None:
    """Refuse to write over the audit of another judge than the embedded one. A judge may have another address."""
    old = judge
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it cannot be read
        old = str(json.loads(result.read_text(encoding="utf-8"))["judge"])
    if old != RubricJudge.name and old.partition(" at ")[0] != judge.partition(" at ")[0]:
        raise SettingsError(f"{result} holds the audit of {old}: name another folder with --output_dir")


def write_audit(config: AuditConfig) -> int:
    """Audit a judge, and write figure, numbers and card; print the tables. Return the exit code."""
    result, out = audit(config), Path(config.output_dir)
    audit_figure(out / "audit.png", result)
    # NaN is no JSON, and numbers of numpy become those of Python.
    values = {"config": asdict(config), **result.as_dict()}
    text = json.dumps(values, indent=2, allow_nan=False, default=np.generic.item)
    write_whole(out / RESULT, text + "\n")
    files = f"Numbers: {out / RESULT}. Figure: {out / 'audit.png'}."
    if config.card:
        card = write_judge_card(out, card_of(result, config.card, config.judge_decoding, config.judge_guard))
        files += f" Card: {card}."
    print_audit(result)
    print(files)
    return 0


def main() -> None:
    run_script(AuditConfig, write_audit)


if __name__ == "__main__":
    main()
