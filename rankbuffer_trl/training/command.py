"""The command `rankbuffer-train`: train a policy with GRPO and RankBuffer rewards.

    rankbuffer-train --config paper/rankbuffer.yaml --dataset_name my_queries.jsonl
    accelerate launch -m rankbuffer_trl.training.command --config paper/rankbuffer.yaml

Every key of the recipe can also be given on the command line, which takes precedence. LoRA and quantisation are TRL's
own flags (`--use_peft`, `--load_in_4bit`).

`--dry_run --num_processes 8` prints the batch arithmetic of eight processes and refuses settings that cannot work. It
needs no GPU, no judge and no policy. `--preflight_only` checks data and judge, prints what the run will cost, and
stops. `--resume_from_checkpoint true` resumes from the newest whole checkpoint in `output_dir`.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from datasets import disable_progress_bars
from huggingface_hub import get_token
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from ..data.queries import DataError, QueryTable, load_queries
from ..errors import RankBufferError, SettingsError
from ..store import StoreError
from .batches import Batches
from .checkpoint import newest_checkpoint, read_manifest, why_torn
from .config import RankBufferConfig
from .distributed import MainProcessError, on_main_process
from .parser import RecipeParser
from .preflight import report
from .progress import run_progress
from .trainer import RankBufferTrainer

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))  # the number of this process on its machine


def load_data(script_args: ScriptArguments, training_args: RankBufferConfig) -> tuple[QueryTable, QueryTable | None]:
    """Load and check the queries to train on and, if the run evaluates, the queries to evaluate on."""
    if not script_args.dataset_name:
        raise SettingsError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
    if script_args.dataset_streaming:
        raise SettingsError(
            "dataset_streaming is not supported: queries are looked up by id, and an epoch visits each once"
        )

    def load(split: str) -> QueryTable:
        rows = load_queries(script_args.dataset_name, script_args.dataset_config, split)
        return QueryTable(rows, training_args.reward_method().responses_needed)

    evaluates = training_args.eval_strategy != "no"
    return load(script_args.dataset_train_split), load(script_args.dataset_test_split) if evaluates else None


def build_trainer(
    script_args: ScriptArguments,
    training_args: RankBufferConfig,
    model_args: ModelConfig,
    queries: QueryTable,
    eval_queries: QueryTable | None,
) -> RankBufferTrainer:
    """Load the policy and build the trainer. Faults of the policy are reported here, before anything runs.

    Raises:
        [`SettingsError`]: if the policy, the rollout server or the Hub cannot be reached.
    """
    if not model_args.model_name_or_path:
        raise SettingsError("model_name_or_path is not set: name the policy to train")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    try:
        return RankBufferTrainer(
            model_args.model_name_or_path,
            args=training_args,
            train_dataset=queries,
            eval_dataset=eval_queries,
            dataset_name=script_args.dataset_name,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    except OSError as error:  # of the libraries that load the policy, reach the rollout server, or reach the Hub
        raise SettingsError(
            f"the trainer for {model_args.model_name_or_path} cannot be built: {' '.join(str(error).split())}"
        ) from error


def push_line(args: RankBufferConfig) -> str:
    """Say what the run pushes to the Hub, and where to.

    Raises:
        [`SettingsError`]: if it pushes, and this machine has no login.
    """
    if not args.push_to_hub:
        return "hub: nothing is pushed; --push_to_hub true pushes policy, buffers and card"
    if not (args.hub_token or get_token()):
        raise SettingsError(
            "push_to_hub is set, but this machine has no login for the Hub: run `hf auth login`, or set push_to_hub to"
            " false"
        )
    name = args.hub_model_id or Path(args.output_dir).absolute().name
    where = name if "/" in name else f"{name} of your account"
    readers = "private" if args.hub_private_repo else "public: everybody can read it"
    return f"hub: policy, buffers and card go to {where} ({readers}), {args.hub_strategy.value}; a login is there"


def log_in(args: RankBufferConfig) -> None:
    """Log in to Weights & Biases if `report_to` names it. The trainer would do so only after the policy is loaded.

    On a terminal, the library of Weights & Biases asks for a key that is missing. The servers are not asked to verify
    the key, so an offline machine passes.

    Raises:
        [`SettingsError`]: if there is no valid key, and no terminal to ask for one.
    """
    if "wandb" not in args.report_to:
        return
    import wandb  # an extra of this package

    try:
        wandb.login(verify=False)
    except wandb.Error as error:
        raise SettingsError(
            f"report_to: wandb cannot log in ({' '.join(str(error).split())}): run `wandb login`, or export"
            " WANDB_API_KEY or WANDB_MODE=offline"
        ) from error


def find_start(args: RankBufferConfig) -> tuple[str | None, int]:
    """Return the checkpoint to resume from and its step, or `None` and 0 for a new run.

    Raises:
        [`StoreError`]: if the checkpoint is not whole, or `output_dir` has none that is.
    """
    wanted = str(args.resume_from_checkpoint)
    if wanted.lower() in ("none", "false"):
        return None, 0
    path = newest_checkpoint(args.output_dir) if wanted.lower() == "true" else Path(wanted)
    if torn := why_torn(path):
        raise StoreError(f"{path} is not a whole checkpoint: {torn}")
    return str(path), read_manifest(path)["step"]


def last_lines(trainer: RankBufferTrainer, dataset_name: str) -> list[str]:
    """Say where the policy is, how to see the report, and how to evaluate or to continue."""
    folder, step = trainer.args.output_dir, trainer.state.global_step
    report_line = f"report: rankbuffer-report {folder} --dataset_name {dataset_name}"
    if trainer.interrupted:
        return [
            f"stopped after step {step} of {trainer.state.max_steps}, with {folder}/checkpoint-{step}",
            "to continue: the same command with --resume_from_checkpoint true (after a used-up budget: a higher one)",
            report_line,
        ]
    return [
        f"policy: {folder}, after step {step}; its buffers are in {folder}/buffers.parquet",
        report_line,
        f"evaluation: python -m evaluation.run --config evaluation/paper.yaml --models {folder}",
    ]


def run(script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig) -> None:
    """Check data and judge, then train, save, and push if `push_to_hub` is set.

    Raises:
        [`RankBufferError`]: for all that the user can mend.
    """
    queries, eval_queries = load_data(script_args, training_args)
    batches = Batches(training_args, len(queries), None if eval_queries is None else len(eval_queries))
    pushes = on_main_process(lambda: push_line(training_args))  # it alone pushes
    on_main_process(lambda: log_in(training_args))  # it alone logs
    if training_args.dry_run:
        say("dry run", [*batches.lines(), pushes])
        return
    checkpoint, done = on_main_process(lambda: find_start(training_args))
    if checkpoint:
        left = max(batches.steps - done, 0)
        say("resume", [f"from {checkpoint}, after step {done} of {batches.steps}: {left} steps are left"])
    on_main_process(lambda: report(training_args, queries, done))
    if training_args.preflight_only:
        return
    trainer = build_trainer(script_args, training_args, model_args, queries, eval_queries)
    try:
        with run_progress(trainer):
            trainer.train(resume_from_checkpoint=checkpoint)
        if not trainer.interrupted:  # else the checkpoint is written, and a scheduler does not wait for more
            if training_args.push_to_hub:
                trainer.push_to_hub()  # saves first
            else:
                trainer.save_model()
                trainer.create_model_card()
        say("end", last_lines(trainer, script_args.dataset_name))
    finally:
        trainer.close()


def say(topic: str, lines: Sequence[str]) -> None:
    """Print lines, each with its topic, on the main process."""
    on_main_process(lambda: print(*(f"[{topic}] {line}" for line in lines), sep="\n", flush=True))


def leave(error: RankBufferError) -> None:
    """Exit with status 1 and one line. A launcher of several processes gets the line, too.

    All processes find the same fault in settings and data. So only the first one of a machine prints it.
    """
    line = f"rankbuffer-train: {error}"
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's launcher shows it as the cause, at the end
        Path(path).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    same_everywhere = isinstance(error, (SettingsError, DataError))
    sys.exit(1 if same_everywhere and LOCAL_RANK else line)


def main(argv: Sequence[str] | None = None) -> None:
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        run(*RecipeParser().parse_args_and_config(argv))
    except MainProcessError as error:  # the main process has the cause in its log, which may be on another machine
        sys.exit(1 if LOCAL_RANK else f"rankbuffer-train: {error}")
    except RankBufferError as error:  # not OSError: after hours of training, its traceback is worth more than one line
        leave(error)


if __name__ == "__main__":
    main()
