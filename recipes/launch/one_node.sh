#!/usr/bin/env bash
# One machine with eight GPUs of 80 GB: 4 GPUs train, 2 sample rollouts, and 2 judge.
#
#   recipes/launch/one_node.sh judge                          # serve the judge until Ctrl-C
#   recipes/launch/one_node.sh data PROMPTS TRAINING_SET      # make a training set, with the policy on GPUs 0-3
#   recipes/launch/one_node.sh estimate [arguments]           # what will the training cost?
#   recipes/launch/one_node.sh [further arguments of train_rankbuffer.py]
#
# GPUs   what                                          port (loopback)
# 0-3    training, ZeRO-3 over 4 processes             51216 (weights to the rollout server)
# 4, 5   rollout server: the policy, tensor parallel   8000
# 6, 7   judge: vLLM, tensor parallel                  8001
#
# If JUDGE_URL names a judge, this script starts none (docs/train.md). A judge at a loopback address has GPUs 6 and 7. If
# the judge is elsewhere, the rollout server gets these two as well. ROLLOUT_GPUS names other GPUs for it.
#
# The paper's layout, with the judge on another machine: all eight GPUs train and sample.
#
#   COLOCATE=yes JUDGE_URL=http://10.0.0.9:8001/v1 recipes/launch/one_node.sh
#
# There is no rollout server then. Each GPU samples with a vLLM of its own, and trains with ZeRO-3 over 8 processes.
# Batch: 8 processes x 2 per device x 10 accumulation = 160. Memory: training 131 GB / 8 = 16 GB, activations 5 GB, output
# layer 5 GB; vLLM 0.4 x 80 = 32 GB: weights 16.4 GB, about 2 GB besides, cache 13 GB = 92,000 tokens, 11 of 20 sequences
# at their longest. Together about 58 of 80 GB.
#
# Batch: 4 processes x 2 per device x 20 accumulation = 160 rollouts = 20 queries x 8. Groups: 2 x 20 is a multiple of 8,
# so each group lies on one process.
#
# Memory of a GPU, by arithmetic (1 GB = 10^9 bytes):
#   training   Qwen3-8B has 8.2e9 parameters of 16 bytes (2 weights, 2 gradients, 4 + 8 master weights and Adam):
#              131 GB / 4                                                                            = 33 GB
#              checkpointed activations: 36 layers x 2 sequences x 8,192 tokens x 4,096 x 2 bytes    =  5 GB
#              output layer: 151,936 x 4,096 x 8 bytes (gathered weights, gradient in float32 and bf16)  =  5 GB
#              together about 43 of 80 GB. If memory is short: per_device_train_batch_size 1, accumulation 40. TRL keeps
#              no logits since 1.15; before, 2 x 4,096 x 151,936 of about 10 bytes took 12 GB.
#   rollouts   weights 16.4 GB / 2 = 8 GB. Cache: 36 layers x 2 x 8 heads x 128 x 2 bytes = 147 kB a token, 74 kB on each
#              GPU; 0.9 x 80 - 8 - 4 = 60 GB hold 800,000 tokens, 100 of 160 sequences at their longest (8,192). The rest
#              waits.
#   judge      Qwen3-30B-A3B: 61 GB / 2 = 31 GB. Cache: 48 x 2 x 4 x 128 x 2 = 98 kB a token, 49 kB on each GPU;
#              0.9 x 80 - 31 - 4 = 37 GB hold 750,000 tokens, 64 questions of up to 11,000.
#
# This script has not been run on GPUs. The tests run it with substitutes for vllm, accelerate and curl.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=recipes/launch/servers.sh
source recipes/launch/servers.sh

read_role "$@"
judge_command 127.0.0.1 --tensor-parallel-size 2
COLOCATE=${COLOCATE:-}
[[ ${COLOCATE:-yes} == yes ]] || die "COLOCATE=$COLOCATE: set it to yes, or unset it"
if [[ -n $COLOCATE ]]; then
    PROCESSES=8 GPUS=0,1,2,3,4,5,6,7 ACCUMULATION=10
    SAMPLING=(--vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --vllm_max_model_length 8192)
else
    PROCESSES=4 GPUS=0,1,2,3 ACCUMULATION=20
    SAMPLING=(--vllm_server_base_url "http://127.0.0.1:$PORT")
fi
ARGUMENTS=(
    --config "$RECIPE" --model_name_or_path "$POLICY" "${JUDGE_ARGUMENTS[@]}"
    "${SAMPLING[@]}" --gradient_accumulation_steps "$ACCUMULATION" "${REST[@]}"
)
other_roles 6,7 0,1,2,3 --tensor-parallel-size 4

need curl hf accelerate
if [[ -n $COLOCATE ]]; then
    if [[ -n $STARTS_JUDGE ]] || judge_is_here; then
        die "COLOCATE takes all eight GPUs: set JUDGE_URL to a judge on another machine"
    fi
    no_rollout_server
else
    need vllm
    if [[ -n $STARTS_JUDGE ]] || judge_is_here; then
        rollout_command 127.0.0.1 4,5 "$GPUS${STARTS_JUDGE:+,6,7}"
    else
        rollout_command 127.0.0.1 4,5,6,7 "$GPUS"
    fi
fi

show_plan "$PROCESSES" "${ARGUMENTS[@]}"
[[ -n $COLOCATE ]] || check_free "http://127.0.0.1:$PORT" ${STARTS_JUDGE:+"${JUDGE_URL%/v1}"}
download "$POLICY" ${STARTS_JUDGE:+"$JUDGE_MODEL"}

start_judge 6,7
if [[ -z $COLOCATE ]]; then
    start rollouts env "${NO_KEYS[@]}" CUDA_VISIBLE_DEVICES="$ROLLOUT_GPUS" VLLM_HOST_IP=127.0.0.1 \
        VLLM_SERVER_DEV_MODE=1 "${ROLLOUTS[@]}"
    wait_judge
    wait_healthy rollouts "http://127.0.0.1:$PORT" "$POLICY"
fi

# VLLM_HOST_IP is the address at which the trainer sends weights to the rollout server.
train training env CUDA_VISIBLE_DEVICES="$GPUS" VLLM_HOST_IP=127.0.0.1 \
    accelerate launch --config_file "accelerate_configs/zero3_${PROCESSES}gpu.yaml" \
    recipes/train_rankbuffer.py "${ARGUMENTS[@]}"
