#!/usr/bin/env bash
#SBATCH --job-name=rankbuffer
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@900
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.log
#SBATCH --open-mode=append
# Slurm with three nodes: the first node serves, and the other two train on 16 GPUs.
#
#   mkdir -p runs && sbatch recipes/launch/slurm.sh [further arguments of train_rankbuffer.py]
#
# Submit it from the top of the repository, in the environment that training needs, on a file system that all nodes see.
#
# Node   GPUs  what                                           port
# 0      0-3   rollout server: the policy, tensor parallel    8000
# 0      4-7   judge: vLLM, tensor parallel                   8001
# 1, 2   0-7   training, ZeRO-3 over 16 processes             29500 (processes), 51216 (weights), both on node 1
#
# If JUDGE_URL names a judge, this script starts none (docs/train.md), and the rollout server gets all of node 0. All nodes
# must reach the judge.
#
# If a node resolves its own name to a loopback address, set SERVE_HOST and TRAIN_HOST to the addresses of node 0 and 1.
# The servers listen at node 0's address in the cluster's network and take no key. Do not use this script in a network
# that you share with others.
#
# Batch: 16 processes x 2 per device x 5 accumulation = 160 rollouts = 20 queries x 8. Some groups lie on two or more
# processes, and the result is the same. With 1, 5 or 10 training nodes, the accumulation is 10, 2 or 1. Other numbers
# cannot make 160 and are refused, unless ACCUMULATION is set.
#
# Memory of a GPU, by arithmetic (one_node.sh has the terms; 1 GB = 10^9 bytes): training 131 GB / 16 = 8 GB,
# activations 5 GB, output layer 5 GB, about 18 of 80 GB; servers as in two_nodes.sh.
#
# 15 minutes before its time is over, Slurm sends SIGTERM to this script, which sends SIGUSR1 to the training nodes.
# The training finishes its step, writes a checkpoint and ends, and the job returns to the queue. Every start resumes
# from the newest whole checkpoint in OUTPUT.
#
# This script has not been run on a cluster. The tests run it with substitutes for srun, scontrol, vllm, accelerate and curl.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?this is a script for sbatch}"
# shellcheck source=recipes/launch/servers.sh
source recipes/launch/servers.sh

OUTPUT=${OUTPUT:-runs/rankbuffer}

# This part runs on each training node. SLURM_NODEID counts the nodes of this step.
if [[ ${RANKBUFFER_ROLE:-} == train ]]; then
    # Some clusters pass srun's signals to all processes of a task. The training gets its signals from this script alone.
    train "training-$SLURM_NODEID" env --ignore-signal=USR1 VLLM_HOST_IP="$TRAIN_HOST" \
        accelerate launch --config_file accelerate_configs/zero3_8gpu.yaml --num_machines "$SLURM_NNODES" \
        --num_processes "$((8 * SLURM_NNODES))" --machine_rank "$SLURM_NODEID" --main_process_ip "$TRAIN_HOST" \
        --main_process_port 29500 --deepspeed_multinode_launcher standard recipes/train_rankbuffer.py "$@"
    exit
fi

case ${1:-} in
judge) die "this script starts the judge itself: leave out the word judge" ;;
data | estimate) die "for this role, run srun --nodes=1 --gpus-per-node=8 --exclusive recipes/launch/one_node.sh $*" ;;
esac
[[ " $*" != *" --output"[_-]dir* ]] || die "set OUTPUT=... instead of --output_dir: checkpoints are looked for there"
refuse_options "$@"
check_judge_addresses
need curl hf vllm accelerate
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
((${#NODES[@]} > 1)) || die "this needs at least two nodes: one serves, the others train"
TRAINERS=$((${#NODES[@]} - 1))
((80 % (8 * TRAINERS) == 0)) || [[ -n ${ACCUMULATION:-} ]] ||
    die "$TRAINERS training nodes cannot make 160 rollouts, 2 per GPU at once: take 1, 2, 5 or 10 besides the node" \
        "that serves, or set ACCUMULATION for another batch"
ACCUMULATION=${ACCUMULATION:-$((80 / (8 * TRAINERS)))}
address() {
    srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="$1" hostname --ip-address | cut -d ' ' -f 1
}
SERVE_HOST=${SERVE_HOST:-$(address "${NODES[0]}")}
TRAIN_HOST=${TRAIN_HOST:-$(address "${NODES[1]}")}
check_address SERVE_HOST "$SERVE_HOST"
check_address TRAIN_HOST "$TRAIN_HOST"
judge_command "$SERVE_HOST" --tensor-parallel-size 4
GPUS=("0,1,2,3,4,5,6,7")
[[ -z $STARTS_JUDGE ]] || GPUS=("0,1,2,3" "4,5,6,7")
rollout_command "$SERVE_HOST" "${GPUS[@]}"
ROLLOUT_URL=http://$SERVE_HOST:$PORT
export TRAIN_HOST

ARGUMENTS=(
    --config "$RECIPE" --model_name_or_path "$POLICY" "${JUDGE_ARGUMENTS[@]}"
    --vllm_server_base_url "$ROLLOUT_URL" --gradient_accumulation_steps "$ACCUMULATION" "$@" --output_dir "$OUTPUT"
)
show_plan "$((8 * TRAINERS))" "${ARGUMENTS[@]}"
check_free "$ROLLOUT_URL" ${STARTS_JUDGE:+"${JUDGE_URL%/v1}"}
download "$POLICY" ${STARTS_JUDGE:+"$JUDGE_MODEL"}
for manifest in "$OUTPUT"/checkpoint-*/rankbuffer/run.json; do # written last: without it, none is whole
    [[ ! -e $manifest ]] || { ARGUMENTS+=(--resume_from_checkpoint true) && break; }
done

serve=(srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="${NODES[0]}" --export=ALL env)
start_judge 4,5,6,7 "${serve[@]}"
start rollouts "${serve[@]}" "${NO_KEYS[@]}" CUDA_VISIBLE_DEVICES="$ROLLOUT_GPUS" VLLM_HOST_IP="$SERVE_HOST" \
    VLLM_SERVER_DEV_MODE=1 "${ROLLOUTS[@]}"
wait_judge
wait_healthy rollouts "$ROLLOUT_URL" "$POLICY"

TELL_LAUNCHER=yes # srun passes SIGUSR1 on to this script on each node, which sends SIGTERM to the training processes
RANKBUFFER_ROLE=train train training srun --overlap --cpu-bind=none --nodes="$TRAINERS" --ntasks="$TRAINERS" --export=ALL \
    --nodelist="$(IFS=, && echo "${NODES[*]:1}")" bash recipes/launch/slurm.sh "${ARGUMENTS[@]}"
if [[ -n $WARNED ]]; then
    say "back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
