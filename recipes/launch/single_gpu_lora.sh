#!/usr/bin/env bash
# One GPU of 80 GB: LoRA on Qwen3-8B, rollouts by vLLM on the same GPU, the judge on another machine.
#
#   JUDGE_URL=http://10.0.0.2:8001/v1 recipes/launch/single_gpu_lora.sh [further arguments of train_rankbuffer.py]
#
# JUDGE_URL is any OpenAI-compatible endpoint, JUDGE its model, OPENAI_API_KEY its key. If it is not vLLM, add
# `--judge_decoding json_schema` (docs/judge.md). This script starts no server.
#
# Batch: 1 process x 1 per device x 160 accumulation = 160 rollouts = 20 queries x 8.
#
# Memory of the GPU, by arithmetic (1 GB = 10^9 bytes):
#   vLLM       0.45 x 80 = 36 GB: weights 16.4 GB, about 2 GB besides, cache 17 GB = 118,000 tokens of 147 kB, 14
#              sequences at their longest (8,192)
#   training   frozen weights 8.2e9 x 2 bytes = 16.4 GB; LoRA of rank 32 on all linear layers, 87e6 parameters x 16 bytes
#              = 1.4 GB; activations 36 layers x 8,192 tokens x 4,096 x 2 bytes = 2.4 GB; logits of one answer 4,096 x
#              151,936 x about 10 bytes = 6 GB: 26 GB
#   together about 62 of 80 GB. With 48 GB, set POLICY to Qwen/Qwen3-4B.
#
# The learning rate is not the paper's. The paper trains all weights, and LoRA usually needs a rate ten times as high.
#
# This script has not been run on a GPU. The tests run it with substitutes for accelerate and curl. They also train, save,
# push and resume LoRA on the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=recipes/launch/servers.sh
source recipes/launch/servers.sh

: "${JUDGE_URL:?set it to the judge\'s base URL, such as http://10.0.0.2:8001/v1}"
RECIPE=${RECIPE:-recipes/paper/rankbuffer.yaml}
POLICY=${POLICY:-Qwen/Qwen3-8B}
JUDGE=${JUDGE:-Qwen/Qwen3-30B-A3B-Instruct-2507}
ARGUMENTS=(
    --config "$RECIPE" --model_name_or_path "$POLICY" --judge_url "$JUDGE_URL" --judge_model "$JUDGE"
    --per_device_train_batch_size 1 --gradient_accumulation_steps 160
    --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules all-linear --learning_rate 1e-5
    --vllm_mode colocate --vllm_gpu_memory_utilization 0.45 --vllm_max_model_length 8192 "$@"
)
python recipes/train_rankbuffer.py "${ARGUMENTS[@]}" --dry_run --num_processes 1
# --quiet leaves out accelerate's own traceback after an error. Those of the training stay.
train env CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" \
    accelerate launch --quiet --config_file accelerate_configs/single.yaml recipes/train_rankbuffer.py "${ARGUMENTS[@]}"
