"""Small trainings on real TRL, and a table of what may disturb them: each row must end like the undisturbed training.

    python tests/helpers/trainings.py FOLDER --policy POLICY --data DATA [--only ROW ...] [--kills 30 --seed 0]

A row is a training and its starts, in FOLDER/<row>. Their processes are forked from this one. The program prints one
JSON line: of each row, what each start left. What its processes wrote is in FOLDER/<row>.<number of the start>.log.
`tests/test_resume.py` compares the rows. With `--kills`, `helpers.kill_loop` kills one more training again and again.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
import transformers.trainer
from deepspeed.accelerator import get_accelerator
from peft import LoraConfig
from safetensors.torch import load_file
from test_tools import BOOKS, CallingTrainer, add_books, tokenizer_that_calls
from transformers import TrainerCallback

from helpers import one_file
from helpers.checkpoints import why_torn
from helpers.fake_hub import FolderHub
from helpers.forks import fork, get_ready, run_ranks
from helpers.kill_loop import kill_again, watch_phases
from helpers.ports import free_ports
from helpers.rollout_server import RolloutServer, allow_client, server_config
from helpers.sampled import AtStep, interrupt_at
from helpers.scripted import ScriptedTrainer, config, contents
from helpers.servers import served
from rankbuffer_tools.train import command
from rankbuffer_trl.checkpointing.manifest import FOLDER, STATE, checkpoints
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.judge import Judge, RubricJudge, TransportError
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training._trainer import RankBufferTrainer

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "quickstart.yaml"
ROLLOUTS = 24  # of one step
HELD = ROLLOUTS + 9  # rollouts that the silent server generates before it falls silent
FAULT = "there it fails"
WEIGHTS = 1e-4  # sums of float32 in another order, through AdamW; docs/results.md has what was measured
# What `accelerate launch` sets for accelerate_configs/zero3_cpu2.yaml.
ZERO3 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto"} | {
    f"ACCELERATE_DEEPSPEED_{name}": value
    for name, value in (
        *(("ZERO_STAGE", "3"), ("ZERO3_INIT", "true"), ("ZERO3_SAVE_16BIT_MODEL", "true")),
        *(("OFFLOAD_OPTIMIZER_DEVICE", "none"), ("OFFLOAD_PARAM_DEVICE", "none")),
    )
}


@dataclass(frozen=True)
class Start:
    """A start of a training, and what becomes of it.

    `leaves` has what the row says of `codes`, the exit codes (by default 0), of `left`, the whole checkpoints and what
    was moved aside, of `steps` in the store, of `saves`, the steps at which callbacks heard of a checkpoint, and of
    `lost`, the outcomes of calls that gave no verdict.
    """

    trouble: Callable[[Path], dict[str, Any]] = lambda folder: {}  # called in each process; arguments of the trainer
    processes: int = 0  # 0: where the training runs
    zero3: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # those that change nothing of the outcome
    resume: str | bool = False  # the checkpoint, or `True` for the newest whole one
    copied: tuple[int, ...] = ()  # the steps of checkpoints that are first copied from the undisturbed training
    before: Callable[[Path], object] = lambda folder: None  # what is done to the folder then
    server: str = "plain"  # the rollout server
    says: tuple[str, ...] = ()  # expressions that its output has
    leaves: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """A training whose outcome is known once it has run undisturbed."""

    settings: dict[str, Any]
    cls: type = RankBufferTrainer
    processes: int = 1
    zero3: bool = False
    queries: int = 12
    evaluated: int = 0
    lora: bool = False
    served: bool = False
    play: Callable[["Training", Start, Path, argparse.Namespace], None] | None = None  # instead of `train`


@dataclass(frozen=True)
class Row:
    """Starts that end like the undisturbed training, or with weights `within` some distance of those of `like`."""

    training: str
    starts: tuple[Start, ...]
    like: str = ""
    within: float = 0.0
    disk: int = 0  # megabytes of a disk of its own


# Troubles


class Stopping(RubricJudge, TrainerCallback):
    """The embedded judge, which stops after `left` answers: at once, from a step on, or from the next micro step.

    Then it is `unreachable`, or it never answers again and, the first time, sends a signal to its own process.
    """

    def __init__(self, left: float = inf, number: int = 0, unreachable: bool = False, step: int = -1, sub=False):
        self.left, self.number, self.unreachable, self.step, self.sub = left, number, unreachable, step, sub
        self.armed = step < 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.armed |= not self.sub and state.global_step == self.step

    def on_substep_end(self, args, state, control, **kwargs):
        self.armed |= self.sub and state.global_step == self.step

    async def complete(self, *args, **kwargs):
        self.left -= self.armed
        if self.left >= 0:
            return await super().complete(*args, **kwargs)
        if self.unreachable:
            raise TransportError("it stopped answering")
        if self.left == -1 and self.number:
            os.kill(os.getpid(), self.number)
        return await asyncio.Event().wait()


def judge_stops(*how, **more) -> Callable:
    return lambda folder: {"judge": Stopping(*how, **more)}


def ctrl_c(step: int) -> Callable:
    return lambda folder: {"callbacks": [interrupt_at(step)]}


def terminate(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def at_step(step: int, call: Callable[[Path], object]) -> Callable:
    """After an optimizer step, before its checkpoint."""
    return lambda folder: {"callbacks": [AtStep(step, lambda control: call(folder))]}


def fails(stage: str, rank: int = 0, after: int = 1, error: type[Exception] | signal.Signals = RuntimeError):
    """Fail in one process at call `after` (from 0) of a function. A signal stands for one that comes then."""

    def trouble(folder: Path) -> dict[str, Any]:
        function, count = resolve_name(stage), itertools.count()

        def call(*args, **kwargs):
            if next(count) == after:
                if not isinstance(error, signal.Signals):
                    raise error(FAULT)
                os.kill(os.getpid(), error)
            return function(*args, **kwargs)

        if int(os.environ.get("RANK", 0)) == rank:
            patch(stage, call).start()
        return {}

    return trouble


def fill(left: int, folder: Path) -> None:
    """Leave so many bytes on the disk of `folder`."""
    free = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - left))


def limit_files(folder: Path) -> None:
    """Let no file grow as large as the optimizer's state, as a quota does. All other files are smaller."""
    size = (folder / "checkpoint-2" / "optimizer.pt").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def remount(option: str, folder: Path) -> None:
    """Root writes where it may not, but not to a disk that is mounted read-only."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def tear(folder: Path) -> None:
    """Tear the newest checkpoint, make an empty one, and damage the live store."""
    (folder / "checkpoint-9" / STATE).unlink()
    (folder / "checkpoint-99").mkdir()
    (folder / LIVE_STORE).parent.mkdir()
    (folder / LIVE_STORE).write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)


# How a training is played


class Saves(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(f"[saved {state.global_step}]")


def train(training: Training, start: Start, folder: Path, arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    rows = load_queries(arguments.data).select(range(training.queries))
    settings, given = training.settings | start.settings, start.trouble(folder)
    make = partial(server_config, url=arguments.urls[start.server]) if training.served else config
    if training.cls is CallingTrainer:
        rows = add_books(rows)
        given |= {"environment_factory": BOOKS, "processing_class": tokenizer_that_calls(arguments.policy)}
    judge = given.pop("judge", Stopping())
    given |= {"judge": Judge(judge, guard=True), "callbacks": [Saves(), judge, *given.get("callbacks", ())]}
    if training.lora:
        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    evaluated = rows.select(range(training.evaluated)) if training.evaluated else None
    handler, resume = signal.getsignal(signal.SIGTERM), start.resume
    trainer = training.cls(arguments.policy, make(folder, **settings), rows, evaluated, **given)
    try:
        trainer.train(resume_from_checkpoint=resume and (resume is True or str(folder / resume)))
    finally:
        assert signal.getsignal(signal.SIGTERM) == handler
    if not trainer.interrupted:
        trainer.save_model(_internal_call=True)  # without a push
        trainer.save_state()
    trainer.accelerator.wait_for_everyone()
    trainer.close()


def run_recipe(training: Training, start: Start, folder: Path, arguments: argparse.Namespace) -> None:
    """Run `rankbuffer-train` with the quickstart's recipe. A fault ends in the exit code that a scheduler sees."""
    command.get_token = lambda: "a token"
    settings = training.settings | start.settings | {"resume_from_checkpoint": start.resume}
    settings |= {"model_name_or_path": arguments.policy, "dataset_name": arguments.data, "output_dir": folder}
    if training.served:
        settings |= {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": arguments.urls[start.server]}
        settings |= {"vllm_importance_sampling_correction": False}
    start.trouble(folder)
    command.main(["--config", str(RECIPE), *(str(word) for key in settings for word in (f"--{key}", settings[key]))])


def run_one_file(training: Training, start: Start, folder: Path, arguments: argparse.Namespace) -> None:
    """Train with the example in one file. Its judge fails now and then."""
    settings = {"case": (4, 0.1)} | training.settings | start.settings
    trainer = one_file.trainer(folder, arguments.policy, arguments.data, **settings)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()


# The table

EACH_STEP = dict(save_strategy="steps", save_steps=1)
SPREAD = dict(num_train_epochs=2, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8)
BATCH_12 = dict(per_device_train_batch_size=12)
SEVERAL = BATCH_12 | dict(num_train_epochs=1, eval_steps=6, steps_per_generation=2, num_iterations=2)
PUSHED = dict(save_total_limit=2, push_to_hub=True, hub_strategy="checkpoint") | EACH_STEP
PROGRAM = BATCH_12 | dict(max_steps=3, max_completion_length=16, save_steps=1, push_to_hub=True)
OVERLONG = {"max_completion_len": 24, "soft_punish_cache": 20}
OVERLONG = {"function": "trl.rewards.get_soft_overlong_punishment", "weight": 0.5, "args": OVERLONG}
TOOLS = dict(max_steps=2, per_device_train_batch_size=8, format_check="think", max_completion_length=400)
TOOLS |= dict(max_tool_calling_iterations=1, model_init_kwargs={"max_position_embeddings": 4096})
TOOLS |= dict(judge_view="transcript", judge_view_limit=40)
scripted = partial(Training, cls=ScriptedTrainer, queries=10, evaluated=5)
TRAININGS = {
    "sampled": Training(EACH_STEP | dict(num_train_epochs=3)),  # 4 steps an epoch
    "short": Training(EACH_STEP | dict(max_steps=4)),
    "accumulated": Training(  # three generations for one optimizer step
        dict(per_device_train_batch_size=8, gradient_accumulation_steps=3, steps_per_generation=1, max_steps=4)
    ),
    "evaluated": Training(SPREAD | EACH_STEP | dict(max_steps=6), evaluated=2),
    "aligned": scripted(SPREAD | dict(per_device_train_batch_size=32)),  # 4 groups of 8: 2 processes have whole groups
    "straddling": scripted(SPREAD),  # 3 groups of 8, so processes have parts of groups
    "several": scripted(SPREAD | SEVERAL),  # four optimizer steps use a generation: two batches, each twice
    "lora": scripted(SPREAD | BATCH_12, lora=True, processes=2, zero3=True),
    "rewards": Training(EACH_STEP | dict(max_steps=3, reward_functions=[OVERLONG]), cls=ScriptedTrainer),
    "tools": Training(EACH_STEP | TOOLS, cls=CallingTrainer),
    "served": Training(EACH_STEP | dict(max_steps=3, judge_during_generation=False), served=True),
    "program": Training(PROGRAM, play=run_recipe, processes=2),
    "program-served": Training(PROGRAM, play=run_recipe, processes=2, served=True),
    "one-file": Training({}, play=run_one_file),
}


def spread(processes: int, per_device: int, accumulation: int = 1, **more) -> Start:
    settings = dict(per_device_train_batch_size=per_device) | more.pop("settings", {})
    if accumulation > 1:
        settings |= dict(gradient_accumulation_steps=accumulation, steps_per_generation=accumulation)
    return Start(processes=processes, settings=settings, **more)


def resumed(step: int, **more) -> tuple[Start]:
    return (Start(copied=(step,), resume=f"checkpoint-{step}", **more),)


def stopped(
    trouble: Callable, left: str, first: Start | None = None, again=(), says=(), **leaves
) -> tuple[Start, ...]:
    """Return two starts, of which the first is stopped. `again` is what differs in the second one."""
    first = first or Start()
    resumed = {"resume": bool(left)} | dict(again)
    return replace(first, trouble=trouble, says=says, leaves={"left": left} | leaves), replace(first, **resumed)


def sigterm(step: int, left: str, sub: bool = False, **settings) -> tuple[Start, ...]:
    """A SIGTERM while a step waits for the judge, which leaves this step."""
    saves = [int(name.split("-")[1]) for name in left.split()]
    trouble = judge_stops(7, signal.SIGTERM, step=step, sub=sub)
    return stopped(trouble, left, Start(settings={"save_strategy": "no"} | settings), steps=step, saves=saves)


def failing(stage: str, saved: int = 1, **how) -> Row:
    """A process of the program fails. The other one says why it ends, if the main process failed in a step."""
    of_main = ("the main process failed with ",) if "rank" not in how and saved < 2 else ()
    return Row("program", stopped(fails(stage, **how), first_ones(saved), says=(FAULT, *of_main), codes=[1, 1]))


def full(left: int, what: str, saved: int) -> Row:
    """The disk has so many bytes left after the third step, and room again when the training is started again."""
    says = (rf"{what}.*(No space left on device|disk is full)",)
    again = {"before": lambda folder: (folder / "filler").unlink()}
    trouble = at_step(3, partial(fill, left))
    return Row("short", stopped(trouble, first_ones(saved), None, again, says, steps=3, codes=[1]), disk=8)


def first_ones(count: int) -> str:
    return " ".join(f"checkpoint-{step + 1}" for step in range(count))


TRAINER, STORE = "rankbuffer_trl.training._trainer.RankBufferTrainer", "rankbuffer_trl.store.BufferStore"
OPTIMIZER, UPLOAD = "accelerate.optimizer.AcceleratedOptimizer.step", "helpers.fake_hub.FolderHub.upload_folder"
EARLY, LATE = dict(judge_during_generation=True), dict(judge_during_generation=False)
BY_TWO, BY_THREE = (dict(save_strategy="steps", save_steps=steps) for steps in (2, 3))
ZERO3_2 = spread(2, 12, zero3=True)
SERVED_2, EARLY_2 = spread(2, 12), spread(2, 12, settings=EARLY)
DIED = ("JudgeError: the judge .*it stopped answering", "MainProcessError: the main process failed with JudgeError")
HUNG = ("JudgeError: the judge .*did not finish a step within judge_step_timeout=5 s", DIED[1])
SILENT = Start(server="silent")
SILENCE = f"{HELD - ROLLOUTS} of {ROLLOUTS} rollouts came within rollout_timeout=3 s"
INTERRUPTED = dict(codes=[1], says=("KeyboardInterrupt",))
STOPPED = r"\[end\] stopped after step {} of 3, with"
# fmt: off
ROWS = {
    **{f"sampled-resumed-{step}": Row("sampled", resumed(step)) for step in (4, 6, 11)},
    "sampled-ctrl-c-2": Row("sampled", stopped(ctrl_c(2), "checkpoint-1", steps=2, **INTERRUPTED)),
    "sampled-ctrl-c-7": Row("sampled", stopped(ctrl_c(7), first_ones(6), steps=7, **INTERRUPTED)),
    "sampled-sigterm-mid-epoch": Row("sampled", sigterm(6, "checkpoint-6")),
    "sampled-sigterm-first-of-an-epoch": Row("sampled", sigterm(8, "checkpoint-8")),
    "sampled-sigterm-first-of-the-run": Row("sampled", sigterm(0, "")),
    "sampled-sigterm-saved-before": Row("sampled", sigterm(6, "checkpoint-3 checkpoint-6", **BY_THREE)),
    "accumulated-sigterm-second-generation": Row("accumulated", sigterm(2, "checkpoint-2", sub=True)),
    "several-sigterm-between-steps": Row("several", stopped(at_step(5, terminate), "checkpoint-8", steps=2)),
    "sampled-torn": Row("sampled", (
        Start(copied=(8, 9), before=tear, resume=True, leaves={"codes": [1], "left": "checkpoint-8"},
              says=(r"StoreError: .*live\.sqlite: .*move it away, then resume from a checkpoint",)),
        Start(before=lambda folder: (folder / LIVE_STORE).rename(folder / "away"), resume=True,
              settings=dict(save_total_limit=1), says=("skipping .*checkpoint-9.*trainer_state.json is missing",),
              leaves={"left": "_torn/checkpoint-9.0 _torn/checkpoint-99.0 checkpoint-12"}),
    )),
    "evaluated-resumed-5": Row("evaluated", resumed(5)),
    "short-disk-full-in-buffers": full(0, "checkpoint-3 could not be written .*: cannot save the buffer store", 2),
    "short-disk-full-in-weights": full(200_000, "checkpoint-3 could not be written .*: Error while serializing", 2),
    "short-disk-full-in-commit": full(735_000, "cannot write the buffer store", 3),
    "short-no-large-files": Row("short", stopped(
        at_step(3, limit_files), first_ones(2), says=("CheckpointError: checkpoint-3 could not be written to",),
        steps=3, codes=[1],
    )),
    "short-read-only": Row("short", (
        Start(before=partial(remount, "ro"), leaves={"codes": [1], "left": "", "steps": 0},
              says=(r"StoreError: cannot open the buffer store .*(Read-only|Permission denied)",)),
        Start(before=partial(remount, "rw")),
    ), disk=8),
    "aligned-spread-2x16": Row("aligned", (spread(2, 16),), within=WEIGHTS),
    "aligned-spread-zero3-2x16": Row("aligned", (spread(2, 16, zero3=True),), within=WEIGHTS),
    "straddling-spread-1x6x4": Row("straddling", (spread(1, 6, 4),), within=WEIGHTS),
    "straddling-spread-2x4x3": Row("straddling", (spread(2, 4, 3),), within=WEIGHTS),
    "straddling-spread-4x2x3": Row("straddling", (spread(4, 2, 3),), within=WEIGHTS),
    "straddling-spread-zero3-2x4x3": Row("straddling", (spread(2, 4, 3, zero3=True),), within=WEIGHTS),
    "straddling-spread-zero3-4x6": Row("straddling", (spread(4, 6, zero3=True),), within=WEIGHTS),
    "straddling-sigint": Row("straddling", stopped(
        judge_stops(120, signal.SIGINT), "checkpoint-2", Start(settings=BY_TWO), steps=3, **INTERRUPTED
    )),
    "straddling-zero3-sigterm": Row(
        "straddling", stopped(judge_stops(40, signal.SIGTERM), "checkpoint-1", ZERO3_2, steps=1), within=WEIGHTS
    ),
    "straddling-zero3-sigkill": Row("straddling", stopped(
        judge_stops(120, signal.SIGKILL), "checkpoint-2", replace(ZERO3_2, settings=BATCH_12 | BY_TWO),
        steps=3, codes=[-9, 1],
    ), within=WEIGHTS),
    # Each process shuffles its own rollouts, so the split decides what a step takes.
    "several-spread-2x6": Row("several", (spread(2, 6),), like="several-spread-2x6"),
    "several-spread-4x3": Row("several", (spread(4, 3),), like="several-spread-4x3"),
    "several-spread-zero3-2x6": Row("several", (spread(2, 6, zero3=True),), like="several-spread-2x6", within=WEIGHTS),
    "lora-sigterm": Row("lora", stopped(judge_stops(40, signal.SIGTERM), "checkpoint-1", ZERO3_2, steps=1)),
    "rewards-resumed-1": Row("rewards", resumed(1)),
    "rewards-spread-1x6x4": Row("rewards", (spread(1, 6, 4),), within=WEIGHTS),
    "rewards-spread-2x12": Row("rewards", (spread(2, 12),), within=WEIGHTS),
    "tools-late": Row("tools", (Start(settings=LATE),)),
    "tools-resumed": Row("tools", (
        Start(copied=(1,), resume=True, settings=dict(judge_view="answer"), leaves={"codes": [1]},
              says=(r"what the judge sees of a rollout with tools\): \['transcript', 40\] in the",)),
        Start(resume=True),
    )),
    "served-early": Row("served", (Start(settings=EARLY),)),
    "served-early-resumed": Row("served", resumed(1, settings=EARLY)),
    "served-2": Row("served", (SERVED_2,), within=WEIGHTS),
    "served-2-early-faulty": Row("served", (replace(EARLY_2, server="faulty"),), like="served-2"),
    **{f"served-2-{when}-judge-dies": Row("served", stopped(
        judge_stops(40, unreachable=True), "checkpoint-1", start, says=DIED, steps=1, codes=[1, 1], lost="unreachable"
    ), like="served-2") for when, start in (("late", SERVED_2), ("early", EARLY_2))},
    "served-2-early-judge-hangs": Row("served", stopped(
        judge_stops(40), "checkpoint-1", replace(EARLY_2, settings=EARLY_2.settings | {"judge_step_timeout": 5.0}),
        {"settings": EARLY_2.settings}, HUNG, steps=1, codes=[1, 1], lost="",
    ), like="served-2"),
    # Nobody ends the processes, and no start takes half a checkpoint for a whole one.
    "program-loading": failing("rankbuffer_trl.training._trainer.AnswerExtractor", saved=0, rank=1, after=0),
    "program-preflight": failing("rankbuffer_tools.train.preflight.ask_sample", saved=0, after=0),
    "program-generation": failing(f"{TRAINER}._generate", rank=1),
    "program-reading": failing(f"{TRAINER}._calculate_rewards", rank=1),
    "program-judging": failing("rankbuffer_trl._step.Step.finish"),
    "program-commit": failing(f"{STORE}.commit"),
    "program-optimizer": failing(OPTIMIZER, rank=1),
    "program-saving": failing(f"{STORE}.save", after=2),
    "program-saving-1": failing(f"{TRAINER}._save_rng_state", rank=1, error=OSError),
    "program-push": failing(UPLOAD, saved=2),
    "program-sigterm": Row("program", stopped(
        fails(OPTIMIZER, error=signal.SIGTERM), first_ones(2), says=(STOPPED.format(2),), steps=2
    )),
    "program-served-silent": Row("program-served", stopped(
        lambda folder: {}, "checkpoint-1", replace(SILENT, settings={"rollout_timeout": 3}),
        {"server": "plain", "settings": {}}, (SILENCE, "the main process failed with "), steps=1, codes=[1, 1],
    )),
    "program-served-sigterm": Row("program-served", stopped(
        fails(f"{TRAINER}._arrived", after=HELD - 1, error=signal.SIGTERM), "checkpoint-1", SILENT,
        {"server": "plain"}, (STOPPED.format(1),), steps=1,
    )),
    "one-file-spread-2x12": Row("one-file", (spread(2, 12),), within=WEIGHTS),
    "one-file-main-process-fails": Row("one-file", (
        spread(2, 12, settings=dict(case=(0, 1), max_failures=0.5), leaves={"codes": [1, 1]},
               says=("RuntimeError: the judge failed for", "Error: the main process failed; its error is the cause")),
        Start(),
    )),
}
# fmt: on


# What is left, and what comes out


def left_by(folder: Path, log: Path) -> dict[str, Any]:
    """What a start left: whole checkpoints, what was moved aside, steps and failures in the store, and its saves."""
    whole = [path for _, path in sorted(checkpoints(folder)) if why_torn(path) is None]
    names = [str(path.relative_to(folder)) for path in [*sorted(folder.glob("_[to][ol]*/*")), *whole]]
    table = {"groups": [], "calls": []}
    if (folder / LIVE_STORE).is_file() and (folder / LIVE_STORE).stat().st_size:
        try:
            table = contents(folder / LIVE_STORE)
        except Exception as error:  # a damaged store
            print(error)
    found = {"left": " ".join(names), "steps": len({row[1] for row in table["groups"]})}
    found["lost"] = " ".join(sorted({row[6] for row in table["calls"]} - {"parsed"}))
    return found | {"saves": [int(step) for step in re.findall(r"^\[saved (\d+)\]$", log.read_text(), re.MULTILINE)]}


def outcome(folder: Path) -> dict[str, Any]:
    """All that must not depend on a disturbance but the weights: buffers, history, ledger of training, rewards."""
    found: dict[str, Any] = {}
    if (folder / FOLDER).is_dir():
        found = contents(folder)
        found["calls"] = [row for row in found["calls"] if row[1] == "train"]
    if (folder / STATE).is_file():
        found["tokens"] = json.loads((folder / STATE).read_text())["num_input_tokens_seen"]
    for name in ("rewards.json", "buffers.json"):
        if (folder / name).is_file():  # a step that was done again has the same line
            found[name] = sorted(set((folder / name).read_text().splitlines()))
    return found


def evaluations(folder: Path) -> Counter:
    """The judgments of evaluation by step and query."""
    calls = contents(folder)["calls"] if (folder / FOLDER).is_dir() else []
    return Counter((row[0], row[4]) for row in calls if row[1] == "eval")


def weights(folder: Path) -> dict:
    return load_file(next(folder.glob("*model.safetensors")))


def distance(folder: Path, other: Path) -> float:
    """The largest difference of two policies. A part that only one of them has is infinitely far away."""
    mine, theirs = weights(folder), weights(other)
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in theirs)


@contextmanager
def small_disk(folder: Path, megabytes: int):
    """Let a folder be on a disk of its own. What is on it at the end stays in the folder."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise PermissionError("a small disk needs the right to mount one")
    try:
        yield
        shutil.copytree(folder, folder.with_suffix(".copy"))
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    folder.rmdir()
    folder.with_suffix(".copy").rename(folder)


def serve(arguments: argparse.Namespace) -> None:
    """Serve rollouts until this process is killed: as they should be, refused now and then, held from some on."""
    texts = [text for line in arguments.data.read_text().splitlines() for text in json.loads(line)["responses"]]
    make = partial(RolloutServer, arguments.policy, texts)
    silent = make(hold=lambda number: (number - 1) % (2 * ROLLOUTS) >= HELD)
    plain, faulty = make(), make(fault=lambda number: number % 7 == 0)
    ports = [int(url.rpartition(":")[2]) for url in arguments.urls.values()]
    with served(plain.app(), ports[0]), served(faulty.app(), ports[1]), served(silent.app(), ports[2]):
        signal.pause()


def load_to_cpu_0(storage: Any, place: str) -> Any:
    """Let torch load to `cpu:0`, where transformers wants the optimizer if there are several processes on a CPU."""
    return storage if place == "cpu:0" else None


def play(training: Training, start: Start, folder: Path, arguments: argparse.Namespace) -> None:
    torch.serialization.register_package(0, lambda storage: None, load_to_cpu_0)
    transformers.trainer.hf_api = lambda: FolderHub(folder.with_name(f"{folder.name}-hub"))
    if training.served:
        allow_client()
    (training.play or train)(training, start, folder, arguments)


def run(name: str, row: Row, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the starts of a row, one after the other, and return what each of them left."""
    training, folder, found = TRAININGS[row.training], arguments.folder / name, []
    with small_disk(folder, row.disk) if row.disk else nullcontext():
        folder.mkdir(exist_ok=True)
        for number, start in enumerate(row.starts):
            for step in start.copied:
                shutil.copytree(arguments.folder / row.training / f"checkpoint-{step}", folder / f"checkpoint-{step}")
                if (rewards := arguments.folder / row.training / "rewards.json").is_file():
                    before = [line for line in rewards.open() if json.loads(line)[0] < step]
                    (folder / rewards.name).write_text("".join(before))
            start.before(folder)
            work = lambda start=start: play(training, start, folder, arguments)  # noqa: E731
            log = folder.with_name(f"{name}.{number}.log")
            environment = ZERO3 if start.zero3 or (training.zero3 and not start.processes) else {}
            processes, alone = start.processes or training.processes, start.leaves.get("codes") == [1, 1]
            codes = run_ranks(processes, work, log, alone, **environment)
            if codes[0] < 0:  # the other one fails or is ended, whichever comes first
                codes[1:] = [int(code != 0) for code in codes[1:]]
            found.append({"codes": codes} | left_by(folder, log))
            assert name not in TRAININGS or not any(codes), log.read_text()[-3000:]
    return found


def killed(arguments: argparse.Namespace) -> dict[str, Any]:
    training = Training(PUSHED | dict(num_train_epochs=4))

    def work(folder: Path, resume: bool) -> None:
        play(training, Start(watch_phases, resume=resume), folder, arguments)

    def same(folder: Path, other: Path) -> bool:
        return outcome(folder) == outcome(other) and distance(folder, other) == 0

    return kill_again(arguments.folder, work, same, arguments.kills, arguments.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    chosen = [ROWS[name] for name in arguments.only or () if name in ROWS]
    wanted = {*(arguments.only or ()), *(row.training for row in chosen), *(row.like for row in chosen)}
    rows = {name: Row(name, (Start(),)) for name in TRAININGS} | ROWS
    get_ready("scipy.io", "networkx", "torch._inductor.compile_fx", "transformers.models.qwen3.modeling_qwen3")
    # DeepSpeed compiles its messages for the CPU once on a machine. No row has to wait for that until it seems hung.
    builder, found = get_accelerator().create_op_builder("ShareMemCommBuilder"), {}
    os.waitpid(fork(builder.load, arguments.folder / "compiler.log"), 0)
    ports = free_ports(3)
    arguments.urls = {
        name: f"http://127.0.0.1:{port}" for name, port in zip(("plain", "faulty", "silent"), ports, strict=True)
    }
    servers = fork(lambda: serve(arguments), arguments.folder / "servers.log")
    try:
        while any(socket.socket().connect_ex(("127.0.0.1", port)) for port in ports):
            time.sleep(0.1)
        for name, row in rows.items():
            if arguments.only is not None and name not in wanted:
                continue
            started = time.perf_counter()
            try:
                found[name] = run(name, row, arguments)
            except PermissionError as error:
                found[name] = str(error)
            print(f"{name}: {found[name]} {time.perf_counter() - started:.1f} s", flush=True)
        if arguments.kills:
            found["kills"] = killed(arguments)
    finally:
        os.kill(servers, signal.SIGKILL)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
