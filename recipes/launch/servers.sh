# shellcheck shell=bash
# Functions for the other scripts in this folder: start servers, wait until they are ready, train, and end everything.
#
# A server runs in its own process group and writes to $LOGS/NAME.log. Everything that a script started ends with the
# script, for any reason. SIGTERM, SIGUSR1 and Ctrl-C first go to the training processes, which finish their step, write
# a checkpoint and end. A second signal ends everything at once.

LOGS=${LOGS:-runs/logs}
START_SECONDS=${START_SECONDS:-1200} # for a server to be ready, loading its weights included
STOP_SECONDS=${STOP_SECONDS:-40}     # for a process to end after SIGTERM, before SIGKILL
POLL_SECONDS=${POLL_SECONDS:-2}
declare -A SERVERS=()
TRAINING=
WARNED=

say() { echo "[$(basename "$0")] $*" >&2; }

die() {
    say "$*"
    exit 1
}

# need COMMAND...: stop the script if a command is missing, before anything is started.
need() {
    local command
    for command; do
        command -v "$command" >/dev/null || die "the command $command is not on PATH: install it first"
    done
}

# check_address NAME ADDRESS: stop the script unless other machines, and not every network, can reach the address.
check_address() {
    case $2 in
    0.0.0.0 | ::) die "$1=$2 would open the servers to every network: name one address" ;;
    127.* | ::1 | localhost) die "$1=$2 is a loopback address, which other machines cannot reach: set $1 to an address in your private network" ;;
    esac
}

# download MODEL...: download weights that are not a folder, so that START_SECONDS counts the loading alone.
download() {
    local model
    for model; do
        [[ -d $model ]] || hf download "$model" >/dev/null || die "$model cannot be downloaded"
    done
}

# ask URL: print what a server answers. A proxy is never asked.
ask() { curl --silent --noproxy '*' --max-time 5 "$@"; }

# rollout_command HOST GPUS: set ROLLOUTS to the command of the rollout server. With ROLLOUT_SERVER=trl, `trl vllm-serve`
# starts vLLM's server. It adds the options on weights and log probabilities itself.
rollout_command() {
    case ${ROLLOUT_SERVER:-vllm} in
    vllm)
        ROLLOUTS=(
            vllm serve "$POLICY" --host "$1" --port 8000 --tensor-parallel-size "$2" --max-model-len 8192
            --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1
        )
        ;;
    trl)
        ROLLOUTS=(
            trl vllm-serve --model "$POLICY" --host "$1" --port 8000 --tensor_parallel_size "$2" --max_model_len 8192
        )
        ;;
    *) die "ROLLOUT_SERVER is ${ROLLOUT_SERVER}: set it to vllm or trl" ;;
    esac
    need "${ROLLOUTS[0]}"
}

# check_free URL...: stop the script if something listens at an address where it will start a server.
check_free() {
    local url status
    for url; do
        status=0
        ask --output /dev/null "$url" || status=$?
        ((status == 7)) || die "something already listens at $url: end it, or it would be taken for our server"
    done
}

# start NAME COMMAND...: run the command in the background. To set its environment, use
# `start NAME env KEY=VALUE ... COMMAND...`.
start() {
    local name=$1
    shift
    mkdir -p "$LOGS"
    say "starting $name, log in $LOGS/$name.log"
    setsid "$@" </dev/null >"$LOGS/$name.log" 2>&1 &
    SERVERS[$name]=$!
}

# wait_healthy NAME URL MODEL: wait until the server answers. Stop the script if the server ends, if START_SECONDS are
# over, or if the server that answers has another model.
wait_healthy() {
    local name=$1 url=$2 model=$3 deadline=$((SECONDS + START_SECONDS)) models
    until ask --fail --output /dev/null "$url/health"; do
        check_alive "$name"
        ((SECONDS < deadline)) || die "$name at $url was not ready after $START_SECONDS s (START_SECONDS)"
        sleep "$POLL_SECONDS"
    done
    check_alive "$name" # else another server answers
    models=$(ask "$url/v1/models" || true)
    [[ $models == *"\"$model\""* ]] || die "the server at $url does not serve $model, so it is not our $name: $models"
    say "$name is ready"
}

# check_alive NAME: stop the script if a server that it started has ended.
check_alive() {
    [[ -z ${SERVERS[$1]:-} ]] || kill -0 "${SERVERS[$1]}" 2>/dev/null && return
    tail -n 20 "$LOGS/$1.log" >&2
    die "$1 ended before it was ready; its whole log is $LOGS/$1.log"
}

# train COMMAND...: run the command in the foreground and return its exit status.
train() {
    local status=0
    say "training: $*"
    setsid "$@" </dev/null &
    TRAINING=$!
    # A signal ends a wait with a status of its own. Once the training has ended, `wait` still returns its status.
    while kill -0 "$TRAINING" 2>/dev/null; do wait "$TRAINING" || true; done
    wait "$TRAINING" || status=$?
    TRAINING=
    return "$status"
}

# children PID: print the child processes. For `accelerate launch` they are the training processes. They get the signal
# and the launcher does not, because it would kill them after 30 seconds, and a checkpoint may take longer.
children() { ps -o pid= --ppid "$1" || true; }

family() {
    local pid
    echo "$1"
    for pid in $(children "$1"); do family "$pid"; done
}

# With TELL_LAUNCHER, the launcher is srun. It passes SIGUSR1 on to its tasks, where this function runs again. On SIGTERM,
# srun would kill its tasks.
warn() {
    local pid told=$TRAINING signal=USR1
    [[ -n $TRAINING && -z $WARNED ]] || exit 143
    WARNED=yes
    say "stopping: the training finishes its step and writes a checkpoint; again to stop at once"
    [[ -n ${TELL_LAUNCHER:-} ]] || { told=$(children "$TRAINING") && signal=TERM; }
    for pid in $told; do kill -"$signal" "$pid" 2>/dev/null || true; done
}

stop() {
    local pid pids=() deadline=$((SECONDS + STOP_SECONDS))
    trap '' TERM INT USR1
    for pid in ${TRAINING:+"$TRAINING"} "${SERVERS[@]}"; do
        # shellcheck disable=SC2207 # one word per process
        pids+=($(family "$pid"))
        kill -TERM -- "-$pid" 2>/dev/null || true
    done
    ((${#pids[@]})) || return 0
    while kill -0 "${pids[@]}" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}

trap stop EXIT
trap warn TERM INT USR1
