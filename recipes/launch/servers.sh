# shellcheck shell=bash
# Functions for the other scripts in this folder: start servers, wait until they are ready, train, and end everything.
#
# A server runs in its own process group and writes to $LOGS/NAME.log. Everything that a script started ends with the
# script, for any reason. SIGTERM, SIGUSR1 and Ctrl-C first go to the training processes, which
# finish their step, write a checkpoint and end. A second signal ends everything at once.

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

# wait_healthy NAME URL: wait until the server answers. Stop the script if the server ends or START_SECONDS are over.
wait_healthy() {
    local name=$1 url=$2 deadline=$((SECONDS + START_SECONDS))
    until curl --silent --fail --max-time 5 --output /dev/null "$url"; do
        if [[ -n ${SERVERS[$name]:-} ]] && ! kill -0 "${SERVERS[$name]}" 2>/dev/null; then
            tail -n 20 "$LOGS/$name.log" >&2
            die "$name ended before it was ready; its whole log is $LOGS/$name.log"
        fi
        ((SECONDS < deadline)) || die "$name at $url was not ready after $START_SECONDS s (START_SECONDS)"
        sleep "$POLL_SECONDS"
    done
    say "$name is ready"
}

# train COMMAND...: run the command in the foreground and return its exit status.
train() {
    local status=0
    say "training: $*"
    setsid "$@" </dev/null &
    TRAINING=$!
    while true; do
        status=0
        wait "$TRAINING" || status=$?
        kill -0 "$TRAINING" 2>/dev/null || break # otherwise a signal ended the wait, and the training still runs
    done
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
