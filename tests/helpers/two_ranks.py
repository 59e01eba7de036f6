"""A program that trains with two processes, of which one fails, once in each stage of a run.

    python tests/helpers/two_ranks.py FOLDER --policy POLICY --data DATA --url URL

Each case is a run in FOLDER/<case>, whose processes are forked from this one and are ended by nobody. Each run is then
resumed by one process. The program prints one JSON line: of each case, the exit codes of its processes, its newest
whole checkpoint, and the exit code of the resumed run. FOLDER/<case>.log is what they wrote.
"""

import argparse
import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from unittest.mock import patch

import transformers.trainer

from helpers.checkpoints import why_torn
from helpers.fake_hub import FolderHub
from helpers.forks import run_ranks
from helpers.rollout_server import allow_client
from rankbuffer_tools.train import command
from rankbuffer_trl.exact.manifest import checkpoints

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "quickstart.yaml"
FAULT = "there it fails"
ROLLOUTS, STEPS = 24, 3
HELD = ROLLOUTS + 9  # rollouts that the server generates before it falls silent


@dataclass(frozen=True)
class Case:
    """A run of two processes, of which process `rank` fails at call `after` (from 0) of the function `stage`.

    `error` is the class of the fault; a signal stands for one that comes then. `saved` is the step of the checkpoint
    that is left. `url` takes rollouts from the server, which falls silent in the second step.
    """

    name: str
    rank: int
    stage: str
    after: int = 1
    error: type[Exception] | signal.Signals = RuntimeError
    saved: int = 1
    url: bool = False


TRAINING = "rankbuffer_trl.training"
TRAINER, STORE = f"{TRAINING}.trainer.RankBufferTrainer", "rankbuffer_trl.store.BufferStore"
CASES = [
    Case("loading", 1, f"{TRAINING}.trainer.AnswerReader", after=0, saved=0),
    Case("preflight", 0, "rankbuffer_tools.train.preflight.ask_sample", after=0, saved=0),
    Case("generation", 1, f"{TRAINER}._generate"),
    Case("rollouts", 0, "", url=True),
    Case("signal", 0, f"{TRAINER}._arrived", after=HELD - 1, error=signal.SIGTERM, url=True),
    Case("reading", 1, f"{TRAINER}._calculate_rewards"),
    Case("judging", 0, f"{TRAINING}.scorer.OpenStep.finish"),
    Case("commit", 0, f"{STORE}.commit"),
    Case("optimizer", 1, "accelerate.optimizer.AcceleratedOptimizer.step"),
    Case("saving", 0, f"{STORE}.save", after=2),
    Case("saving-1", 1, f"{TRAINER}._save_rng_state", error=OSError),
    Case("push", 0, "helpers.fake_hub.FolderHub.upload_folder", saved=2),
]


def failing(case: Case) -> Callable:
    """The function of a case as it is, but for one call."""
    function, count = resolve_name(case.stage), itertools.count()

    def call(*args, **kwargs):
        if next(count) == case.after:
            if not isinstance(case.error, signal.Signals):
                raise case.error(FAULT)
            os.kill(os.getpid(), case.error)
        return function(*args, **kwargs)

    return call


def train(folder: Path, arguments: argparse.Namespace, case: Case | None) -> None:
    transformers.trainer.hf_api = lambda: FolderHub(folder.with_name(f"{folder.name}-hub"))
    command.get_token = lambda: "a token"
    resume = case is None and newest(folder) > 0
    words = [
        *("--config", str(RECIPE), "--model_name_or_path", arguments.policy),
        *("--dataset_name", str(arguments.data), "--output_dir", str(folder), "--max_steps", str(STEPS)),
        *("--per_device_train_batch_size", str(ROLLOUTS // 2 if case else ROLLOUTS), "--max_completion_length", "16"),
        *("--save_steps", "1", "--push_to_hub", "true", "--resume_from_checkpoint", str(resume).lower()),
    ]
    if case and case.url:
        allow_client()
        words += ["--use_vllm", "true", "--vllm_mode", "server", "--vllm_server_base_url", arguments.url]
        words += ["--vllm_importance_sampling_correction", "false"]
        words += [] if case.stage else ["--rollout_timeout", "3"]
    if case and case.stage and int(os.environ["RANK"]) == case.rank:
        patch(case.stage, failing(case)).start()
    command.main(words)


def newest(folder: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 if there is none."""
    return next((step for step, path in checkpoints(folder) if why_torn(path) is None), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("--policy", "--data", "--url"):
        parser.add_argument(name)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    found = {}
    for case in CASES:
        if arguments.only not in case.name:
            continue
        folder, log = arguments.folder / case.name, arguments.folder / f"{case.name}.log"
        folder.mkdir(parents=True)
        codes = run_ranks(2, lambda: train(folder, arguments, case), log, alone=True)  # noqa: B023
        step = newest(folder)
        resumed = run_ranks(1, lambda: train(folder, arguments, None), log.with_suffix(".resumed"))  # noqa: B023
        found[case.name] = {"codes": codes, "step": step, "resumed": resumed, "end": newest(folder)}
        print(case.name, found[case.name], flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
