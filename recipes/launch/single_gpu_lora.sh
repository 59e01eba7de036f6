#!/usr/bin/env bash
# One GPU of 80 GB: LoRA on Qwen3-8B, rollouts by vLLM and a small judge, all on the same GPU.
#
#   recipes/launch/single_gpu_lora.sh judge                       # serve the judge until Ctrl-C
#   recipes/launch/single_gpu_lora.sh data PROMPTS TRAINING_SET   # make a training set
#   recipes/launch/single_gpu_lora.sh estimate [arguments]        # what will the training cost?
#   recipes/launch/single_gpu_lora.sh [further arguments of train_rankbuffer.py]
#
# If JUDGE_URL names a judge, this script starts none (docs/train.md). It may be any OpenAI-compatible endpoint, with its
# key in OPENAI_API_KEY. If it is not vLLM, add `--judge_decoding json_schema` (docs/judge.md). If the judge is on another
# machine, rollouts get its part of the memory. A judge of 4B parameters, the default here, is weak: audit it
# (docs/audit.md), or use a larger one elsewhere.
#
# Batch: 1 process x 1 per device x 160 accumulation = 160 rollouts = 20 queries x 8.
#
# Memory of the GPU, by arithmetic (1 GB = 10^9 bytes):
#   rollouts   0.35 x 80 = 28 GB: weights 16.4 GB, about 2 GB besides, cache 9.6 GB = 65,000 tokens of 147 kB, 7
#              sequences at their longest (8,192). With a judge elsewhere 0.45: 36 GB, 118,000 tokens, 14 sequences.
#   judge      0.25 x 80 = 20 GB: Qwen3-4B has 8.1 GB of weights and about 2 GB besides; cache 9.9 GB = 67,000 tokens of
#              147 kB, one question of 65,536 or six of 11,000
#   training   frozen weights 8.2e9 x 2 bytes = 16.4 GB; LoRA of rank 32 on all linear layers, 87e6 parameters x 16 bytes
#              = 1.4 GB; activations 36 layers x 8,192 tokens x 4,096 x 2 bytes = 2.4 GB: 20 GB
#   together about 68 of 80 GB. With 48 GB, use a judge elsewhere, and set POLICY to Qwen/Qwen3-4B.
#
# The learning rate is not the paper's. The paper trains all weights, and LoRA usually needs a rate ten times as high.
#
# This script has not been run on a GPU. The tests run it with substitutes for vllm, accelerate and curl. They also train,
# save, push and resume LoRA on the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
DEFAULT_JUDGE=Qwen/Qwen3-4B-Instruct-2507
# shellcheck source=recipes/launch/servers.sh
source recipes/launch/servers.sh

read_role "$@"
judge_command 127.0.0.1 --gpu-memory-utilization "${JUDGE_MEMORY:-0.25}"
GPU=${CUDA_VISIBLE_DEVICES:-0}
MEMORY=0.35
[[ -n $STARTS_JUDGE ]] || judge_is_here || MEMORY=0.45
ARGUMENTS=(
    --config "$RECIPE" --model_name_or_path "$POLICY" "${JUDGE_ARGUMENTS[@]}"
    --per_device_train_batch_size 1 --gradient_accumulation_steps 160
    --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules all-linear --learning_rate 1e-5
    --vllm_mode colocate --vllm_gpu_memory_utilization "$MEMORY" --vllm_max_model_length 8192 "${REST[@]}"
)
other_roles "$GPU" "$GPU" --gpu-memory-utilization 0.5

need curl hf accelerate
no_rollout_server
show_plan 1 "${ARGUMENTS[@]}"
download "$POLICY"
provide_judge "$GPU"
# --quiet leaves out accelerate's own traceback after an error. Those of the training stay.
train training env CUDA_VISIBLE_DEVICES="$GPU" \
    accelerate launch --quiet --config_file accelerate_configs/single.yaml recipes/train_rankbuffer.py "${ARGUMENTS[@]}"
