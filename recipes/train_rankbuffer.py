"""Train a policy with GRPO and RankBuffer rewards.

    accelerate launch --config_file accelerate_configs/zero3_8gpu.yaml \
        recipes/train_rankbuffer.py --config recipes/rankbuffer/qwen3_8b_nectar.yaml

Every key of the YAML can also be given on the command line, where it wins. LoRA and quantisation are TRL's own flags
(`--use_peft`, `--load_in_4bit`). `--resume_from_checkpoint true` goes on from the newest whole checkpoint in
`output_dir`.
"""

from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from rankbuffer_trl.config import RankBufferConfig
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.trainer import RankBufferTrainer


def build_trainer(
    script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig
) -> RankBufferTrainer:
    """Load data and policy. Whatever is wrong with either is said here, before anything runs."""
    if not script_args.dataset_name:
        raise ValueError("dataset_name is not set: name a .jsonl or .parquet file, or a data set on the Hub")
    if script_args.dataset_streaming:
        raise ValueError(
            "dataset_streaming is not supported: queries are looked up by id, and an epoch visits each once"
        )
    if not model_args.model_name_or_path:
        raise ValueError("model_name_or_path is not set: name the policy to train")
    train_dataset = load_queries(script_args.dataset_name, script_args.dataset_config, script_args.dataset_train_split)
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = load_queries(
            script_args.dataset_name, script_args.dataset_config, script_args.dataset_test_split
        )
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    return RankBufferTrainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def main(script_args: ScriptArguments, training_args: RankBufferConfig, model_args: ModelConfig) -> None:
    """Train, save, and push if `push_to_hub` is set."""
    trainer = build_trainer(script_args, training_args, model_args)
    resume = training_args.resume_from_checkpoint
    try:
        trainer.train(resume_from_checkpoint=True if str(resume).lower() == "true" else resume)
        trainer.save_model()
        if training_args.push_to_hub:
            trainer.push_to_hub(dataset_name=script_args.dataset_name)
    finally:
        trainer.close()


def make_parser() -> TrlParser:
    """The parser of this recipe: data, training, model."""
    return TrlParser((ScriptArguments, RankBufferConfig, ModelConfig))


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
