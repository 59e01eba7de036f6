"""A program that spreads the same rollouts over processes in many ways.

    python tests/helpers/spread.py FOLDER --policy POLICY --data DATA

Each case is a run in FOLDER/<case>. Its processes are forked from this one. Some cases get a signal in the middle of
judging and are resumed. The program prints one JSON line: the exit codes of the processes of each case.
"""

import argparse
import json
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import deepspeed  # noqa: F401  (imported once here, not in each process)

from helpers.forks import fork, wait
from helpers.scripted import ScriptedTrainer, config
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.training.trainer import RankBufferTrainer

# What `accelerate launch` sets for accelerate_configs/zero3_cpu2.yaml.
ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
}


@dataclass(frozen=True)
class Case:
    """One way to spread a run. All cases of a family must end with the same result.

    A generation batch of `aligned` has 4 groups of 8, so 2 and 4 processes hold whole groups. A generation batch of
    `straddling` has 3 groups of 8, so processes hold parts of groups. `several` takes 4 optimizer steps with each
    generation: two batches, each used twice.
    """

    family: str
    processes: int
    per_device: int
    accumulation: int = 1
    zero3: bool = False
    signal: str = ""

    @property
    def name(self) -> str:
        engine = "zero3" if self.zero3 else "gloo" if self.processes > 1 else "one"
        name = f"{self.family}-{engine}-{self.processes}x{self.per_device}x{self.accumulation}"
        return f"{name}-{self.signal}" if self.signal else name


CASES = [
    Case("aligned", 1, 32),
    Case("aligned", 2, 16),
    Case("aligned", 2, 8, accumulation=2),
    Case("aligned", 4, 8),
    Case("aligned", 2, 16, zero3=True),
    Case("straddling", 1, 24),
    Case("straddling", 1, 6, accumulation=4),
    Case("straddling", 2, 12),
    Case("straddling", 2, 4, accumulation=3),
    Case("straddling", 4, 2, accumulation=3),
    Case("straddling", 2, 4, accumulation=3, zero3=True),
    Case("straddling", 4, 6, zero3=True),
    Case("straddling", 2, 12, zero3=True, signal="SIGTERM"),
    Case("straddling", 2, 12, zero3=True, signal="SIGKILL"),
    Case("several", 1, 12),
    Case("several", 2, 6),
    Case("several", 4, 3),
    Case("several", 2, 6, zero3=True),
]


class SignalledWhileJudging(RubricJudge):
    """A judge that sends a signal to its own process in the middle of a step."""

    def __init__(self, number: int, after: int):
        self.number, self.left = number, after

    async def complete(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
        return await super().complete(*args, **kwargs)


def train(case: Case, folder: Path, policy: str, data: str, resume: bool = False) -> RankBufferTrainer:
    rows = load_queries(data)
    several = case.family == "several"
    settings = config(
        folder / case.name,
        per_device_train_batch_size=case.per_device,
        gradient_accumulation_steps=case.accumulation,
        steps_per_generation=2 if several else case.accumulation,
        num_iterations=2 if several else 1,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=12 if several else 2,
        per_device_eval_batch_size=8,
        save_strategy="steps" if case.signal == "SIGKILL" else "no",
        save_steps=2,
    )
    judge = None
    if case.signal:
        after = {"SIGTERM": 40, "SIGKILL": 165}[case.signal]  # judgments: in the second and in the fourth step
        judge = Judge(SignalledWhileJudging(signal.Signals[case.signal], 0 if resume else after), guard=True)
    trainer = ScriptedTrainer(policy, settings, rows, rows.select(range(5)), judge=judge)
    trainer.train(resume_from_checkpoint=resume or None)
    if not trainer.interrupted:
        trainer.save_model(str(folder / case.name / "end"))
    trainer.accelerator.wait_for_everyone()
    trainer.close()
    return trainer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def spread(case: Case, folder: Path, work) -> list[int]:
    """Do `work` in each process of a case, in the environment that torchrun would set."""
    world = dict(ZERO3) if case.zero3 else {}
    if case.processes > 1:
        world |= {"WORLD_SIZE": case.processes, "LOCAL_WORLD_SIZE": case.processes}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    log = folder / f"{case.name}.log"
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} if world else {} for rank in range(case.processes)]
    return wait([fork(work, log, **world, **rank) for rank in ranks], timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy")
    parser.add_argument("--data")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    folder, policy, data = arguments.folder, arguments.policy, arguments.data
    folder.mkdir(parents=True, exist_ok=True)
    codes = {}
    for case in CASES:
        if arguments.only not in case.name:
            continue
        started = time.perf_counter()
        codes[case.name] = spread(case, folder, lambda case=case: train(case, folder, policy, data))
        if case.signal:
            stopped = sorted(path.name for path in (folder / case.name).glob("checkpoint-*"))
            (folder / f"{case.name}.stopped").write_text(" ".join(stopped))
            codes[case.name] += spread(case, folder, lambda case=case: train(case, folder, policy, data, resume=True))
        print(f"{case.name}: {codes[case.name]} {time.perf_counter() - started:.1f} s", flush=True)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
