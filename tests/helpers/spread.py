"""A program that spreads the same rollouts over processes in many ways.

    python tests/helpers/spread.py FOLDER --policy POLICY --data DATA

Each case is a run in FOLDER/<case>. Its processes are forked from this one. Some cases get a signal in the middle of
judging and are resumed. The program prints one JSON line: of each case, the exit codes of its processes, and what the
signal left.
"""

import argparse
import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from peft import LoraConfig

from helpers.forks import fork, run_ranks
from helpers.scripted import ScriptedTrainer, config, contents
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.store.places import LIVE_STORE

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

    A generation batch of `aligned` has 4 groups of 8, so 2 processes hold whole groups. A generation batch of
    `straddling` has 3 groups of 8, so processes hold parts of groups. `several` takes 4 optimizer steps with each
    generation: two batches, each used twice. `lora` is `straddling` with an adapter.
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
    Case("aligned", 2, 16, zero3=True),
    Case("straddling", 1, 24),
    Case("straddling", 1, 6, accumulation=4),
    Case("straddling", 2, 4, accumulation=3),
    Case("straddling", 4, 2, accumulation=3),
    Case("straddling", 2, 4, accumulation=3, zero3=True),
    Case("straddling", 4, 6, zero3=True),
    Case("straddling", 1, 24, signal="SIGINT"),
    Case("straddling", 2, 12, zero3=True, signal="SIGTERM"),
    Case("straddling", 2, 12, zero3=True, signal="SIGKILL"),
    Case("several", 1, 12),
    Case("several", 2, 6),
    Case("several", 4, 3),
    Case("several", 2, 6, zero3=True),
    Case("lora", 2, 12, zero3=True),
    Case("lora", 2, 12, zero3=True, signal="SIGTERM"),
]
AFTER = {"SIGTERM": 40, "SIGINT": 165, "SIGKILL": 165}  # judgments: in the second step, and in the fourth


class SignalledWhileJudging(RubricJudge):
    """A judge that sends a signal to its own process in the middle of a step and never answers again."""

    def __init__(self, name: str, resumed: bool):
        self.number, self.left = signal.Signals[name], 0 if resumed else AFTER[name]

    async def complete(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)
            await asyncio.Event().wait()
        return await super().complete(*args, **kwargs)


def train(case: Case, folder: Path, policy: str, data: str, resume: bool = False) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    rows = load_queries(data)
    several = case.family == "several"
    settings = config(
        folder / case.name,
        per_device_train_batch_size=case.per_device,
        gradient_accumulation_steps=case.accumulation,
        steps_per_generation=2 if several else case.accumulation,
        num_iterations=2 if several else 1,
        num_train_epochs=1 if several else 2,
        eval_strategy="steps",
        eval_steps=6 if several else 2,
        per_device_eval_batch_size=8,
        save_strategy="steps" if case.signal in ("SIGKILL", "SIGINT") else "no",
        save_steps=2,
    )
    judge = Judge(SignalledWhileJudging(case.signal, resume), guard=True) if case.signal else None
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft_config = lora if case.family == "lora" else None
    trainer = ScriptedTrainer(policy, settings, rows, rows.select(range(5)), judge=judge, peft_config=peft_config)
    trainer.train(resume_from_checkpoint=resume or None)
    if not trainer.interrupted:
        trainer.save_model(str(folder / case.name / "end"))
    trainer.accelerator.wait_for_everyone()
    trainer.close()


def left(folder: Path) -> tuple[list[str], list[int]]:
    """What a signal left of a run: the names of its checkpoints, and the steps that are in its store."""
    steps = {row[1] for row in contents(folder / LIVE_STORE)["groups"]}
    return sorted(path.name for path in folder.glob("checkpoint-*")), sorted(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy")
    parser.add_argument("--data")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    folder, found = arguments.folder, {}
    folder.mkdir(parents=True, exist_ok=True)
    # DeepSpeed compiles its messages for the CPU once on a machine. No case has to wait for that until it seems hung.
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    os.waitpid(fork(builder.load, folder / "compiler.log"), 0)

    def spread(case: Case, resume: bool = False) -> list[int]:
        log, environment = folder / f"{case.name}.log", ZERO3 if case.zero3 else {}
        work = lambda: train(case, folder, arguments.policy, arguments.data, resume)  # noqa: E731
        return run_ranks(case.processes, work, log, **environment)

    for case in CASES:
        if arguments.only not in case.name:
            continue
        started = time.perf_counter()
        found[case.name] = {"codes": spread(case)}
        if case.signal:
            found[case.name] |= {"left": left(folder / case.name), "resumed": spread(case, resume=True)}
        print(f"{case.name}: {found[case.name]} {time.perf_counter() - started:.1f} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
