"""A program that trains on rollouts of a server with one and two processes, judging during and after generation.

    python tests/helpers/early_runs.py FOLDER --policy POLICY --data DATA --url URL --faulty URL

Each case is a run in FOLDER/<case>, whose processes are forked from this one. Each process writes the name and the
text of the error that ended it to FOLDER/<case>.<rank>, or nothing.
"""

import argparse
import asyncio
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from helpers.forks import get_ready, run_ranks
from helpers.judges import Embedded
from helpers.rollout_server import allow_client, server_config
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.judge import Judge, TransportError
from rankbuffer_trl.training.trainer import RankBufferTrainer

ROLLOUTS = 24  # of one step


@dataclass(frozen=True)
class Case:
    """One way to run. `answers` are the judgments after which the judge fails, or hangs."""

    processes: int
    early: bool
    faulty: bool = False
    answers: int | None = None
    hang: bool = False

    @property
    def name(self) -> str:
        parts = ["early" if self.early else "late", str(self.processes)]
        parts += ["faulty"] * self.faulty + ["hangs" if self.hang else "dies"] * (self.answers is not None)
        return "-".join(parts)


CASES = [
    Case(1, early=False),
    Case(2, early=False),
    Case(2, early=True, faulty=True),
    Case(2, early=False, answers=40),
    Case(2, early=True, answers=40),
    Case(2, early=True, answers=40, hang=True),
]


def failing(answers: int, hang: bool) -> Embedded:
    """Make a judge that fails after a number of answers: it raises an error, or it never answers again."""
    left = count(answers - 1, -1)

    async def fail(asked):
        if next(left) < 0:
            if hang:
                await asyncio.Event().wait()
            raise TransportError("it stopped answering")

    return Embedded(before=fail, name="failing judge at nowhere")


def train(case: Case, folder: Path, arguments: argparse.Namespace) -> None:
    allow_client()
    url = arguments.faulty if case.faulty else arguments.url
    settings = server_config(
        folder / case.name,
        url,
        max_steps=3,
        per_device_train_batch_size=ROLLOUTS // case.processes,
        judge_during_generation=case.early,
        **({"judge_step_timeout": 5.0} if case.hang else {}),
    )
    judge = None if case.answers is None else Judge(failing(case.answers, case.hang))
    trainer = RankBufferTrainer(arguments.policy, settings, load_queries(arguments.data), judge=judge)
    error = ""
    try:
        trainer.train()
        trainer.save_model(str(folder / case.name / "end"))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    (folder / f"{case.name}.{os.environ.get('RANK', 0)}").write_text(error)
    trainer.accelerator.wait_for_everyone()
    trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("--policy", "--data", "--url", "--faulty"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    get_ready("transformers.models.qwen3.modeling_qwen3")
    for case in CASES:
        log = folder / f"{case.name}.log"
        codes = run_ranks(case.processes, lambda case=case: train(case, folder, arguments), log)
        print(case.name, codes, flush=True)
        if any(codes):
            raise SystemExit(log.read_text()[-3000:])


if __name__ == "__main__":
    main()
