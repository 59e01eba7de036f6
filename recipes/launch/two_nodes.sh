#!/usr/bin/env bash
# Two machines with eight GPUs each: one trains on all eight, and the other one serves. In the paper one machine trains and
# samples: COLOCATE in one_node.sh.
#
#   on the serving machine:   SERVE_HOST=10.0.0.2 recipes/launch/two_nodes.sh serve
#   on the training machine:  SERVE_HOST=10.0.0.2 TRAIN_HOST=10.0.0.1 recipes/launch/two_nodes.sh train [arguments]
#
# Machine    GPUs  what                                          port
# training   0-7   training, ZeRO-3 over 8 processes             51216 at TRAIN_HOST (weights to the rollout server)
# serving    0-3   rollout server: the policy, tensor parallel   8000 at SERVE_HOST
# serving    4-7   judge: vLLM, tensor parallel                  8001 at SERVE_HOST
#
# If JUDGE_URL names a judge, this script starts none (docs/train.md). Set it on both machines, to an address that the
# training machine can reach. The rollout server then gets all eight GPUs, or those that ROLLOUT_GPUS names.
#
# The hosts are addresses in a private network: the servers take no key, and VLLM_SERVER_DEV_MODE lets everybody who
# reaches the rollout server replace its weights. There is no default, and 0.0.0.0 is refused.
#
# Batch: 8 processes x 2 per device x 10 accumulation = 160 rollouts = 20 queries x 8. Groups: 2 x 10 is no multiple of
# 8, so 4 of 20 groups lie on two processes. The result is the same: groups are gathered and judged whole.
#
# Memory of a GPU, by arithmetic (one_node.sh has the terms; 1 GB = 10^9 bytes):
#   training   131 GB / 8 = 16 GB, activations 5 GB, output layer 5 GB: about 26 of 80 GB
#   rollouts   weights 16.4 GB / 4 = 4 GB; the other 64 of 0.9 x 80 GB hold 1,700,000 tokens at 37 kB on each GPU:
#              all 160 sequences at their longest (1,310,720 tokens)
#   judge      61 GB / 4 = 15 GB; the other 53 hold 2,100,000 tokens at 25 kB on each GPU
#
# This script has not been run on GPUs. The tests run it with substitutes for vllm, accelerate and curl.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=recipes/launch/servers.sh
source recipes/launch/servers.sh

ROLE=${1:-}
case $ROLE in
judge) die "the role serve starts the judge with the rollout server: $0 serve" ;;
data | estimate)
    die "on the training machine, run recipes/launch/one_node.sh $* (while \`$0 serve\` runs, with" \
        "JUDGE_URL=http://${SERVE_HOST:-SERVE_HOST}:$((PORT + 1))/v1 before it)"
    ;;
esac
[[ $ROLE == serve || $ROLE == train ]] || die "say what this machine does: $0 serve, or $0 train"
shift
: "${SERVE_HOST:?set it to the address of the serving machine in your private network}"
check_address SERVE_HOST "$SERVE_HOST"
refuse_options "$@"
need curl hf
judge_command "$SERVE_HOST" --tensor-parallel-size 4
[[ -n $STARTS_JUDGE ]] || check_judge_addresses
ROLLOUT_URL=http://$SERVE_HOST:$PORT

if [[ $ROLE == serve ]]; then
    [[ -z $PLAN_ONLY ]] || die "the servers have no plan: leave out --dry_run"
    need vllm
    GPUS=("0,1,2,3,4,5,6,7")
    [[ -z $STARTS_JUDGE ]] || GPUS=("0,1,2,3" "4,5,6,7")
    rollout_command "$SERVE_HOST" "${GPUS[@]}"
    check_free "$ROLLOUT_URL" ${STARTS_JUDGE:+"${JUDGE_URL%/v1}"}
    download "$POLICY" ${STARTS_JUDGE:+"$JUDGE_MODEL"}
    start_judge 4,5,6,7
    start rollouts env "${NO_KEYS[@]}" CUDA_VISIBLE_DEVICES="$ROLLOUT_GPUS" VLLM_HOST_IP="$SERVE_HOST" \
        VLLM_SERVER_DEV_MODE=1 "${ROLLOUTS[@]}"
    wait_judge
    wait_healthy rollouts "$ROLLOUT_URL" "$POLICY"
    serve_until_ended
fi

: "${TRAIN_HOST:?set it to the address of this machine in your private network}"
check_address TRAIN_HOST "$TRAIN_HOST"
need accelerate
ARGUMENTS=(
    --config "$RECIPE" --model_name_or_path "$POLICY" "${JUDGE_ARGUMENTS[@]}"
    --vllm_server_base_url "$ROLLOUT_URL" --gradient_accumulation_steps 10 "$@"
)
show_plan 8 "${ARGUMENTS[@]}"
download "$POLICY"
SERVED_BY="run $0 serve on the serving machine first; its first download takes long"
[[ -z $STARTS_JUDGE ]] || NOT_THERE=$SERVED_BY
check_judges
wait_healthy rollouts "$ROLLOUT_URL" "$POLICY"
train training env VLLM_HOST_IP="$TRAIN_HOST" \
    accelerate launch --config_file accelerate_configs/zero3_8gpu.yaml recipes/train_rankbuffer.py "${ARGUMENTS[@]}"
