"""The command `rankbuffer-train`: train a policy with GRPO and RankBuffer rewards.

    rankbuffer-train --config paper/rankbuffer.yaml --dataset_name my_queries.jsonl
    accelerate launch -m rankbuffer_tools.train.command --config paper/rankbuffer.yaml

Every key of the recipe can also be given on the command line, which takes precedence. LoRA and quantisation are TRL's
own flags (`--use_peft`, `--load_in_4bit`).

With nothing else, `rankbuffer-train` trains the quickstart: a tiny policy, on the CPU.

`--dry_run --num_processes 8` prints the plan of a run of eight processes with an estimate of its cost, and refuses
settings that cannot work. It needs no GPU, no judge and no policy. Without the data set it prints the plan alone, says
how to make the set, and fails. `--preflight_only` does the same with the judge: it
asks real questions and prints what they cost. `--resume_from_checkpoint true` resumes from the newest whole checkpoint
in `output_dir`.
"""

import json
import logging
import os
import re
import runpy
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from tqdm import tqdm
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from rankbuffer_trl.checkpointing.manifest import read_manifest
from rankbuffer_trl.data import DataError, MissingFileError, check_prompts, load_queries
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.training import (
    NO_POLICY,
    Batches,
    MainProcessError,
    RankBufferConfig,
    RankBufferTrainer,
    RunPlan,
    check_budget,
    check_not_uploaded,
    check_trusted,
    check_unchanged,
    differences,
    identity,
    on_main_process,
    policy_differences,
    without_effect,
)

from ..data.tokens import load_tokenizer
from ..paper import RECIPE_FOLDER
from ..terminal import prepare_terminal
from .ending import FAILED, exit_code, tell_launcher
from .memory import memory_line
from .parser import NO_DATA, RecipeParser
from .preflight import report
from .price import RunPrice

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # the number of this process on its machine


def make_plan(script_args: ScriptArguments, training_args: RankBufferConfig) -> RunPlan:
    """Load the data, plan the run, and find the checkpoint to resume from.

    Raises:
        [`RankBufferError`]: for settings, data or a checkpoint that cannot be used.
    """
    if not script_args.dataset_name:
        raise SettingsError(NO_DATA)
    if script_args.dataset_streaming:
        raise SettingsError(
            "dataset_streaming is not supported: queries are looked up by id, and an epoch visits each once"
        )
    training_args.check_view(tools=False)  # the command passes no tools
    splits = [script_args.dataset_train_split]
    if training_args.eval_strategy != "no":
        splits.append(script_args.dataset_test_split)
    try:
        data = [load_queries(script_args.dataset_name, script_args.dataset_config, split) for split in splits]
    except MissingFileError:
        if training_args.dry_run and (queries := training_args.dry_run_queries):
            missing = (
                f"the data set {script_args.dataset_name} does not exist: this is the plan for"
                f" dry_run_queries={queries}, at an unknown cost"
            )
            say("dry run", [missing, *Batches(training_args, queries).lines()])
        raise
    plan = RunPlan.of(training_args, data[0], data[1] if len(data) > 1 else None)
    checkpoint, done = on_main_process(lambda: find_start(plan))  # all processes must resume from one checkpoint
    return replace(plan, checkpoint=checkpoint, done=done)


def build_trainer(script_args: ScriptArguments, model_args: ModelConfig, plan: RunPlan) -> RankBufferTrainer:
    """Load the policy and build the trainer.

    Raises:
        [`SettingsError`]: if the policy, the rollout server or the Hub cannot be reached.
    """
    plan.args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(plan.args.model_init_kwargs or {}),  # last: the user's own win
    }
    try:
        return RankBufferTrainer(
            model_args.model_name_or_path,
            args=plan.args,
            train_dataset=plan.queries,
            eval_dataset=plan.eval_queries,
            plan=plan,
            dataset_name=script_args.dataset_name,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except OSError as error:  # of the libraries that load the policy, reach the rollout server, or reach the Hub
        raise SettingsError(
            f"the trainer for {model_args.model_name_or_path} cannot be built: {' '.join(str(error).split())}"
        ) from error


def push_line(args: RankBufferConfig, model_args: ModelConfig) -> str:
    """Say what the run pushes to the Hub, and where to."""
    if not args.push_to_hub:
        return "hub: nothing is pushed; --push_to_hub true pushes policy, buffers and card"
    if not (args.hub_token or get_token()):  # now, not at the first push
        raise SettingsError(
            "push_to_hub is set, but this machine has no login for the Hub: run `hf auth login`, or set push_to_hub to"
            " false"
        )
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    where = name if "/" in name else f"{name} of your account"
    readers = "private" if args.hub_private_repo else "public: everybody can read it"
    line = f"hub: policy, buffers and card go to {where} ({readers}), {args.hub_strategy.value}; a login is there"
    if model_args.use_peft and Path(str(model_args.model_name_or_path)).is_dir():
        line += f"; the adapter will name {model_args.model_name_or_path} as its base, which others do not have"
    return line


def log_in(args: RankBufferConfig) -> None:
    """Log in to Weights & Biases if `report_to` names it. On a terminal, its library asks for a missing key.

    Raises:
        [`SettingsError`]: if there is no valid key, and no terminal to ask for one.
    """
    if "wandb" not in args.report_to:  # the trainer would log in after the policy is loaded
        return
    import wandb  # an extra of this package

    try:
        wandb.login(verify=False)  # no server is asked, so that an offline machine passes
    except wandb.Error as error:
        raise SettingsError(
            f"report_to: wandb cannot log in ({' '.join(str(error).split())}): run `wandb login`, or export"
            " WANDB_API_KEY or WANDB_MODE=offline"
        ) from error


def find_start(plan: RunPlan) -> tuple[str | None, int]:
    """Return the checkpoint to resume from and its step, or `None` and 0 for a new run.

    Raises:
        [`SettingsError`]: if a budget of the judge is used up already.
        [`CheckpointError`]: if the checkpoint is not whole, if `output_dir` has none that is, if it comes from
            elsewhere and is not trusted, or if each push would upload it.
    """
    resume_from = str(plan.args.resume_from_checkpoint)
    if resume_from.lower() in ("none", "false"):
        check_budget(plan.args, plan.args.output_dir, None)
        return None, 0
    path, saved = plan.checkpoints.find(True if resume_from.lower() == "true" else resume_from)
    check_trusted(path, plan.args.output_dir, plan.args.trust_checkpoint)  # the trainer does so after the preflight
    if plan.args.push_to_hub:
        check_not_uploaded(path, plan.args.output_dir)
    if saved["step"] < plan.batches.steps:  # a run that is done asks the judge nothing
        check_budget(plan.args, plan.args.output_dir, path)
    return str(path), saved["step"]


def check_same_run(plan: RunPlan, model_args: ModelConfig) -> None:
    """Check that the checkpoint is one of this run.

    Raises:
        [`CheckpointError`]: naming all that differs.
    """
    if plan.checkpoint and not plan.args.resume_with_changes:
        path = Path(plan.checkpoint)
        saved, peft = read_manifest(path), get_peft_config(model_args)
        adapter = peft.to_dict() | {"base_model_name_or_path": model_args.model_name_or_path} if peft else None
        changed = policy_differences(path, saved, plan.args, adapter)  # the trainer knows more, but is built later
        check_unchanged(path, [*differences(saved, identity(plan)), *changed])


def check_template(
    name: str | None, revision: str | None, rows: Iterable[Mapping[str, Any]] = (), **kwargs: Any
) -> None:
    """Check that the policy can read the prompts.

    Raises:
        [`SettingsError`]: if there is no policy, if it is an adapter, or if its tokenizer cannot be loaded or has no
            chat template.
        [`DataError`]: if the template refuses a prompt or leaves out a part of it.
    """
    if not name:
        raise SettingsError(NO_POLICY)
    tokenizer = load_tokenizer(name, revision)
    if not tokenizer.chat_template:
        raise SettingsError(f"{name} has no chat template: take an instruction-tuned policy, or add a template")
    if find_adapter_config_file(name, revision=revision):
        raise SettingsError(
            f"{name} is an adapter, and a run begins with a whole policy: merge it into its base (merge_and_unload of"
            " peft), save that with the tokenizer, and name the new folder"
        )
    check_prompts(rows, tokenizer, **kwargs)


def unchecked(name: str | None, revision: str | None, rows: Iterable[Mapping[str, Any]], **kwargs: Any) -> list[str]:
    """Check the prompts if the policy's tokenizer is on this machine. Else say in a line that they are not checked.

    Raises:
        [`DataError`]: if the template refuses a prompt or leaves out a part of it.
    """
    try:
        if name:
            check_prompts(rows, load_tokenizer(name, revision, local=True), **kwargs)  # a dry run needs no network
    except SettingsError:
        return [
            "prompts: not checked against the policy's chat template, because its tokenizer is not on this machine;"
            " `rankbuffer-data check --tokenizer` does"
        ]
    return []


def last_lines(trainer: RankBufferTrainer, data: ScriptArguments, policy: str) -> list[str]:
    """Say where the policy is, how to see the report, and how to compare, to evaluate or to continue."""
    folder, step = trainer.args.output_dir, trainer.state.global_step
    quoted = shlex.quote(str(folder))
    label = re.sub(r"[^\w.+-]", "-", name := Path(folder).name)  # the evaluation takes no other characters
    model = quoted if label == name else f"{label}={quoted}"
    report_line = f"report: rankbuffer-report {quoted} --dataset_name {shlex.quote(str(data.dataset_name))}"
    if trainer.interrupted and not Path(folder, f"checkpoint-{step}").exists():  # a SIGTERM before the first step
        return ["stopped before a step was done, so there is nothing to save", "to continue: the same command"]
    if trainer.interrupted:
        return [
            f"stopped after step {step} of {trainer.state.max_steps}, with {folder}/checkpoint-{step}",
            "to continue: the same command with --resume_from_checkpoint true (after a used-up budget: a higher one)",
            report_line,
        ]
    table, args = Path(folder, "buffers.parquet"), trainer.args
    options = judge_options(args, "judge_api_key_env", "judge_request", "chat_template_kwargs")
    with_options = f" {shlex.join(options)}" if options else ""
    return [
        f"policy: {folder}, after step {step}" + (f"; its buffers are in {table}" if table.is_file() else ""),
        report_line,
        f"comparison with the policy before: {comparison(args, data, policy)}",
        "evaluation (needs the official files first: evaluation/README.md): python -m evaluation.run --config"
        f" evaluation/paper.yaml --output_dir {quoted}/_evaluation{with_options} --models {model}",
    ]


def comparison(args: RankBufferConfig, data: ScriptArguments, policy: str) -> str:
    """Return the command that compares a policy with the one before, on prompts that were kept apart if there are."""
    name, config = Path(data.dataset_name), data.dataset_config
    # The test split has prompts that the policy was not trained on.
    split = data.dataset_train_split if args.eval_strategy == "no" else data.dataset_test_split
    apart = Path(f"{name.parent / name.stem}_kept_apart{name.suffix}")  # as recipes/generate_rubrics.py names it
    if apart.is_file():
        name, config, split = apart, None, "train"
    options = {
        "run_dir": [args.output_dir],
        "dataset_name": [name],
        "dataset_config": [config],
        "dataset_train_split": [None if split == "train" else split],
        "models": [f"before={policy}", f"after={args.output_dir}"],
    }
    command = ["rankbuffer-compare"]
    for option, values in options.items():
        arguments = [str(value) for value in values if value is not None]
        command += [f"--{option}", *arguments] if arguments else []
    return shlex.join([*command, *judge_options(args)])


def judge_options(args: RankBufferConfig, *more: str) -> list[str]:
    """Return the options that name the judge of a run, and `more` that are set. One that is embedded has none."""
    words = ["--judge_url", *args.judge_url, "--judge_model", str(args.judge_model)] if args.judge_url else []
    defaults = RankBufferConfig.__dataclass_fields__
    for key in more:
        if (value := getattr(args, key)) and value != defaults[key].default:
            words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def run(script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig) -> None:
    """Check data and judge, then train, save, and push if `push_to_hub` is set.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    plan = make_plan(script_args, training_args)
    pushes = on_main_process(lambda: push_line(training_args, model_args))  # it alone pushes
    on_main_process(lambda: log_in(training_args))  # it alone logs
    template = training_args.chat_template_kwargs or {}
    name, revision = model_args.model_name_or_path, model_args.model_revision
    if training_args.only_checks:
        unchecked_lines = on_main_process(lambda: unchecked(name, revision, plan.rows, **template))
        say("dry run" if training_args.dry_run else "preflight", [*plan.batches.lines(), pushes, *unchecked_lines])
    if plan.checkpoint:
        steps, path = plan.batches.steps, Path(plan.checkpoint)
        remaining = max(steps - plan.done, 0)
        left = "1 step is" if remaining == 1 else f"{remaining} steps are"
        overridden = on_main_process(lambda: without_effect(read_manifest(path), plan.args))
        say("resume", [f"from {plan.checkpoint}, after step {plan.done} of {steps}: {left} left", *overridden])
    if training_args.dry_run:
        say("dry run", [*RunPrice(plan).estimated_cost(), memory_line(training_args, model_args)])
        return
    if training_args.preflight_only:
        on_main_process(lambda: report(plan))
        return
    # Not for checks, which may have other numbers of processes.
    on_main_process(lambda: check_same_run(plan, model_args))
    on_main_process(lambda: check_template(name, revision, plan.rows, **template))  # before the preflight is paid for
    trainer: RankBufferTrainer | None = None
    try:
        if plan.done < plan.batches.steps:  # else only the end is left to do
            on_main_process(lambda: report(plan))
        trainer = build_trainer(script_args, model_args, plan)
        with beside_the_bar():
            trainer.train(resume_from_checkpoint=plan.checkpoint)
        if not trainer.interrupted:  # else the checkpoint is written, and a scheduler does not wait for more
            if training_args.push_to_hub:
                trainer.push_to_hub()  # saves first
            else:
                trainer.save_model()
                trainer.create_model_card()
        say("end", last_lines(trainer, script_args, model_args.model_name_or_path))
    except RankBufferError as error:
        tell_launcher(error, training_args.output_dir, trainer.state.global_step if trainer else 0)
        raise
    finally:
        if trainer:
            trainer.close()


class BesideTheBar(logging.Handler):
    """Write a line of a log where no progress bar stands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it."""
        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def beside_the_bar() -> Iterator[None]:
    """Let warnings begin their own line, which the last resort of `logging` appends to the progress bar."""
    before, logging.lastResort = logging.lastResort, BesideTheBar(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = before


def launched_for_more() -> bool:
    """Return whether a launcher started several processes, or DeepSpeed: then a recipe was forgotten."""
    return os.environ.get("WORLD_SIZE", "1") != "1" or "ACCELERATE_USE_DEEPSPEED" in os.environ


def quickstart(*arguments: str) -> None:
    """Train a tiny policy under the embedded judge, and show what it learned: the program without any word.

    Raises:
        [`SettingsError`]: if what draws the result is not installed.
    """
    path, argv = RECIPE_FOLDER / "quickstart" / "run.py", sys.argv
    program = f"accelerate launch {argv[0]}" if argv[0].endswith(".py") else "rankbuffer-train"
    print("[quickstart] no recipe is named: a tiny policy learns by ranks on this CPU, in three minutes", flush=True)
    sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as error:
        raise SettingsError(f"the quickstart needs {error.name}: pip install 'rankbuffer-trl[tools]'") from error
    finally:
        sys.argv = argv
    print(
        f"[quickstart] your policy, your prompts, your judge: {program} --config beyond/listwise_two.yaml"
        " --model_name_or_path NAME --dataset_name data/my_prompts.jsonl --judge_url URL --judge_model NAME"
    )


def say(topic: str, lines: Sequence[str]) -> None:
    """Print lines, each with its topic, on the main process."""
    on_main_process(lambda: print(*(f"[{topic}] {line}" for line in lines), sep="\n", flush=True))


def exit_with(error: RankBufferError) -> None:
    """Exit with one line and the code of the error. A launcher of several processes gets the line, too."""
    line = f"rankbuffer-train: {error}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's launcher shows it as the cause, at the end
        Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    if (code := exit_code(error)) != FAILED:
        print(line, file=sys.stderr)
        sys.exit(code)
    # All processes find the same fault in settings and data.
    same_everywhere = isinstance(error, (SettingsError, DataError))
    sys.exit(1 if same_everywhere and LOCAL_RANK else line)


def main(argv: Sequence[str] | None = None) -> None:
    prepare_terminal()
    try:
        if not (sys.argv[1:] if argv is None else argv) and not launched_for_more():
            quickstart()
        else:
            run(*RecipeParser().parse_args_and_config(argv))
    except MainProcessError as error:  # the main process has the cause in its log, which may be on another machine
        sys.exit(1 if LOCAL_RANK else f"rankbuffer-train: {error}")
    except RankBufferError as error:  # not OSError: after hours of training, its traceback is worth more than one line
        exit_with(error)
    except KeyboardInterrupt:
        again = "to continue: the same command with --resume_from_checkpoint true, if there is one"
        sys.exit(1 if LOCAL_RANK else f"rankbuffer-train: interrupted. The last checkpoint is kept; {again}")


if __name__ == "__main__":
    main()
