"""The training commands that `make test-gpu` runs. The fast tests parse them, since most machines have no GPU."""

RECIPE = ("--config", "recipes/quickstart/quickstart.yaml")
# The settings of the quickstart, but on a GPU, in bf16 and shorter. The backward pass of eager attention always adds
# in the same order, so two runs can be compared bit by bit.
COMMON = (
    *("--use_cpu", "false", "--bf16", "true", "--dtype", "bfloat16", "--attn_implementation", "eager"),
    *("--max_steps", "4", "--save_steps", "2", "--max_completion_length", "32", "--gradient_checkpointing", "true"),
)
LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear")
# A high learning rate moves the policy far in one step. A server that missed the new weights would have other
# log-probabilities: by 0.24 to 0.37 in the mean, and by 0.10 to 0.16 with LoRA (the same settings on the CPU).
VLLM = (
    *("--use_vllm", "true", "--vllm_importance_sampling_mode", "token_truncate", "--learning_rate", "1e-2"),
    *("--top_p", "1.0", "--max_grad_norm", "10"),
)
COLOCATE = (*VLLM, "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.2", "--vllm_max_model_length", "512")
SERVER = (*VLLM, "--vllm_mode", "server")
JUDGE = ("--judge_model", "judge", "--judge_decoding", "regex")

RUNS = {
    "bf16": COMMON,
    "LoRA": (*COMMON, *LORA),
    "colocate": (*COMMON, *COLOCATE),
    "LoRA in colocate": (*COMMON, *COLOCATE, *LORA),
    "judge": (*COMMON, *JUDGE, "--judge_url", "http://127.0.0.1:8001/v1"),
    "server": (*COMMON, *SERVER, "--vllm_server_base_url", "http://127.0.0.1:8000"),
    "LoRA with a server": (*COMMON, *SERVER, *LORA, "--vllm_server_base_url", "http://127.0.0.1:8000"),
}
"""The arguments of each run by name, without policy and output folder. Tests put the addresses of their servers."""


def gpu_command(name: str, policy: object, output_dir: object, *more: str) -> list[str]:
    """Return the arguments of `recipes/train_rankbuffer.py` for a run. Arguments in `more` win."""
    return [*RECIPE, "--model_name_or_path", str(policy), "--output_dir", str(output_dir), *RUNS[name], *more]
