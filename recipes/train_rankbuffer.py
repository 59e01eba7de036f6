"""Train a policy with GRPO and RankBuffer rewards.

    accelerate launch --config_file accelerate_configs/zero3_8gpu.yaml \
        recipes/train_rankbuffer.py --config recipes/paper/rankbuffer.yaml

Every key of the YAML file can also be given on the command line, which wins. LoRA and quantisation are TRL's own flags
(`--use_peft`, `--load_in_4bit`).

`--dry_run --num_processes 8` prints the batch arithmetic of eight processes and refuses settings that cannot work. It
needs no GPU, no judge and no policy. `--preflight_only` checks data and judge, prints what the run will cost, and
stops. `--resume_from_checkpoint true` resumes from the newest whole checkpoint in `output_dir`.
"""

import sys
from pathlib import Path

import yaml
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.training.batches import Batches
from rankbuffer_trl.training.config import RankBufferConfig
from rankbuffer_trl.training.distributed import on_main_process
from rankbuffer_trl.training.preflight import report
from rankbuffer_trl.training.progress import run_progress
from rankbuffer_trl.training.trainer import RankBufferTrainer


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
    """Load the policy and build the trainer. Faults of the policy are reported here, before anything runs."""
    if not model_args.model_name_or_path:
        raise SettingsError("model_name_or_path is not set: name the policy to train")
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return RankBufferTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=queries,
        eval_dataset=eval_queries,
        dataset_name=script_args.dataset_name,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def main(script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig) -> None:
    """Check data and judge, then train, save, and push if `push_to_hub` is set."""
    queries, eval_queries = load_data(script_args, training_args)
    batches = Batches(training_args, len(queries), None if eval_queries is None else len(eval_queries))
    if training_args.dry_run:
        on_main_process(lambda: print(*(f"[dry run] {line}" for line in batches.lines()), sep="\n"))
        return
    on_main_process(lambda: report(training_args, queries))
    if training_args.preflight_only:
        return
    trainer = build_trainer(script_args, training_args, model_args, queries, eval_queries)
    resume = training_args.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(resume).lower(), resume)
    try:
        with run_progress(trainer):
            trainer.train(resume_from_checkpoint=resume)
        if trainer.interrupted:  # the checkpoint is written, and the scheduler does not wait for more
            return
        if training_args.push_to_hub:
            trainer.push_to_hub()  # saves first
        else:
            trainer.save_model()
            trainer.create_model_card()
    finally:
        trainer.close()


class RecipeParser(TrlParser):
    """TRL's parser for YAML files that can name a base file in this folder, as in `base: base.yaml`."""

    def set_defaults_with_config(self, base: str | None = None, **config) -> list[str]:
        """Set the keys of the base as defaults, then the keys of `config`, which win."""
        if base is None:
            return super().set_defaults_with_config(**config)
        path = Path(__file__).parent / base
        return self.set_defaults_with_config(**{**yaml.safe_load(path.read_text()), **config})


def make_parser() -> TrlParser:
    """Build the parser of this recipe, for data, training and model."""
    return RecipeParser((ScriptArguments, RankBufferConfig, ModelConfig))


if __name__ == "__main__":
    try:
        main(*make_parser().parse_args_and_config())
    except RankBufferError as error:  # not OSError: after hours of training, its traceback is worth more than one line
        sys.exit(f"train_rankbuffer: {error}")
