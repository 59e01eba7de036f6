# shellcheck shell=bash
# Settings and functions that the other scripts in this folder share.
#
# JUDGE_URL    base URL of a judge that is served already, such as http://127.0.0.1:8001/v1, or several with a space
#              between them, which share the queries. The script then starts no judge. It waits until each of them answers
#              and checks that it serves JUDGE_MODEL. Without JUDGE_URL, the script starts a judge and ends it.
# JUDGE_MODEL  the judge's name. The old name of this variable, JUDGE, still works.
# ROLLOUT_GPUS    GPUs of the rollout server, such as 4,5. ROLLOUT_SERVER=trl starts it with `trl vllm-serve`.
# SAMPLER_URL  base URL of a server of POLICY, for the role `data` alone. Without it, the script starts one and ends it.
# POLICY       the policy to train.
# RECIPE       the recipe of the training.
# PORT         port of the policy's server (default 8000). A judge that the script starts gets the next port.
# ROLLOUT_COPIES  copies of the policy on the GPUs of the rollout server (default 1: all of them share one by tensor
#              parallelism). More copies sample faster if the policy fits into fewer GPUs. vLLM calls this data parallelism.
# JUDGE_CONTEXT   context of the judge in tokens (default 65536 for a judge that the script starts). Buffers keep at most as
#              many anchors as fit into it. Without it, they grow under a judge that is served already as in the paper.
#
# RETRIES      how often a training that a judge or a rollout server has ended (exit code 75) is started again (default 0),
#              from its newest checkpoint, after RETRY_SECONDS (default 60). The servers of the script must live on.
#
# Servers and training run in process groups of their own and append to $LOGS/NAME.log, after a line with the date and the
# number of the attempt. All of them end with the script, for any reason: SIGKILL too. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C
# first go to the training processes, which write a checkpoint and end. Another signal ends everything at once, unless it
# comes within 5 seconds.
#
# Servers do not get the variables *API_KEY, nor the one that judge_api_key_env names in the arguments, in RECIPE or in a
# recipe beside it or in recipes/, which can be its base.

if [[ $OSTYPE != linux* ]] || ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then
    echo "$0: needs Linux and bash 4.4; elsewhere, rankbuffer-train --dry_run and --preflight_only check a run" >&2
    exit 1
fi
unset CDPATH # with it, `cd` can print the folder
# vLLM compiles a kernel at its start, and ends if it finds no nvcc.
if ! command -v nvcc >/dev/null && [[ ! -x ${CUDA_HOME:-/usr/local/cuda}/bin/nvcc ]]; then
    export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
fi
# In WSL2, vLLM leaves memory unpinned, and ends where it needs it pinned.
[[ $(uname -r) != *[Mm]icrosoft* ]] || export VLLM_WSL2_ENABLE_PIN_MEMORY=${VLLM_WSL2_ENABLE_PIN_MEMORY:-1}
RECIPE=${RECIPE:-recipes/paper/rankbuffer.yaml}
POLICY=${POLICY:-Qwen/Qwen3-8B}
PORT=${PORT:-8000}
JUDGE_MODEL=${JUDGE_MODEL:-${JUDGE:-${DEFAULT_JUDGE:-Qwen/Qwen3-30B-A3B-Instruct-2507}}}
read -r -d "" -a JUDGE_URLS <<<"${JUDGE_URL:-}" || true # to the end, because addresses may stand on several lines
JUDGE_URLS=("${JUDGE_URLS[@]%/}")
JUDGE_URL=${JUDGE_URLS[*]}
ROLLOUT_COPIES=${ROLLOUT_COPIES:-1}
STARTS_JUDGE= # set if this script starts the judge
LOGS=${LOGS:-runs/logs}
START_SECONDS=${START_SECONDS:-1200} # for a server to be ready, loading its weights included
STOP_SECONDS=${STOP_SECONDS:-40}     # for a process to end after SIGTERM, before SIGKILL
POLL_SECONDS=${POLL_SECONDS:-2}
RETRIES=${RETRIES:-0}
RETRY_SECONDS=${RETRY_SECONDS:-60}
declare -A SERVERS=() FIRST_LINE=() # FIRST_LINE: of what each writes in this attempt
TRAINING=
PAUSED= # set between two attempts of a training
PLAN_ONLY= # set if the arguments have --dry_run
FOLLOWER=
NO_KEYS=() # options of `env`
NOT_THERE="start it, or correct JUDGE_URL"
WARNED= # the second at which a signal came

# Who reads the output may be gone, for example `tee` after a Ctrl-C. A subshell fails then: if a second signal comes just
# when an `echo` of the script itself fails within a trap, bash ends the script, with the status 2.
say() { (echo "[$(basename "$0")] $*" >&2) || true; }

die() {
    say "$*"
    exit 1
}

for name in JUDGE_CONTEXT PORT RETRIES RETRY_SECONDS ROLLOUT_COPIES START_SECONDS STOP_SECONDS; do
    [[ ${!name:-0} =~ ^(0|[1-9][0-9]{0,8})$ ]] || die "$name=${!name} is no whole number: set it again, or unset it"
done
((PORT && PORT < 65535)) || die "PORT=$PORT leaves no port for the judge, which takes the next one: set 1 to 65534"

# need COMMAND...: stop the script if a command is missing, before anything is started. A plan needs none.
need() {
    local command
    [[ -z $PLAN_ONLY ]] || return 0
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

# check_judge_addresses: stop the script unless other machines can reach each judge that is served already.
check_judge_addresses() {
    local url
    for url in "${JUDGE_URLS[@]}"; do check_address JUDGE_URL "$(host_of "$url")"; done
}

# host_of URL: print the host of a URL.
host_of() {
    local host=${1#*://}
    host=${host%%/*}
    host=${host%:*}
    host=${host#[}
    echo "${host%]}"
}

# download MODEL...: download weights that are not a folder, so that START_SECONDS counts the loading alone.
download() {
    local model
    for model; do
        [[ -d $model ]] || hf download "$model" >/dev/null || die "$model cannot be downloaded"
    done
}

# refuse_options ARGUMENT...: stop the script if an argument names the judge or the policy, because the script starts
# servers for both, or a file of the folder that the script has left. Also set NO_KEYS to what leaves keys out of the
# environment of servers.
refuse_options() {
    local argument name told
    [[ $PWD -ef $OLDPWD ]] || say "paths count from $PWD"
    for argument in "$RECIPE" "$POLICY/config.json" "${@#--*=}"; do
        [[ ! -f $OLDPWD/$argument || $argument -ef $OLDPWD/$argument ]] ||
            die "$argument is a file of $OLDPWD, and paths count from $PWD: name its whole path"
    done
    [[ -f $RECIPE ]] || die "there is no recipe $RECIPE in $PWD: set RECIPE to another, or unset it"
    told="$* $(cat "$RECIPE" "$(dirname "$RECIPE")"/*.yaml recipes/*.yaml recipes/*/*.yaml 2>/dev/null || true)"
    for name in $(compgen -e); do
        [[ $name == *API_KEY || $told =~ judge[_-]api[_-]key[_-]env[=:\ ]+[\"\']?$name([^A-Za-z0-9_]|$) ]] || continue
        NO_KEYS+=(-u "$name")
    done
    for argument; do
        case ${argument%%=*} in
        --judge[_-]url | --judge[_-]model) die "set JUDGE_URL=... and JUDGE_MODEL=... instead of ${argument%%=*}" ;;
        --model[_-]name[_-]or[_-]path) die "set POLICY=... instead of ${argument%%=*}" ;;
        esac
    done
    if asks_for dry_run "$@"; then PLAN_ONLY=yes; fi
    if asks_for preflight_only "$@" && [[ ${ROLE:-} != estimate ]]; then
        die "for a preflight, take the role estimate, which starts a judge if there is none: $0 estimate"
    fi
}

# asks_for OPTION ARGUMENT...: tell whether the arguments have an option that is on or off, and have it on.
asks_for() {
    local option="[ ]--${1//_/[_-]}" words
    shift
    words=" $* "
    [[ $words =~ ${option}[=\ ] && ! $words =~ ${option}[=\ ]([Ff]alse|0|no)\  ]]
}

# show_plan PROCESSES ARGUMENT...: print the plan of a training, and refuse settings that cannot work before any weights are
# loaded. With --dry_run, the script ends here.
show_plan() {
    python recipes/train_rankbuffer.py "${@:2}" --dry_run --num_processes "$1"
    [[ -z $PLAN_ONLY ]] || exit 0
}

# no_rollout_server: stop the script if a variable is set that is about a rollout server, because it starts none.
no_rollout_server() {
    local default value
    for default in ROLLOUT_GPUS= ROLLOUT_COPIES=1 ROLLOUT_SERVER=vllm; do
        value=$(printenv "${default%=*}" || true)
        [[ -z $value || $value == "${default#*=}" ]] || die "this starts no rollout server: unset ${default%=*}"
    done
}

# read_role ARGUMENT...: set ROLE to what a script shall do, and REST to its further arguments. The default is `train`.
read_role() {
    ROLE=train
    case ${1:-} in
    judge | data | estimate)
        ROLE=$1
        shift
        ;;
    -h | --help) # the comment at the top of the script
        sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "recipes/launch/${0##*/}"
        exit
        ;;
    -*) ;;
    ?*) die "$1 is no role: say judge, data or estimate, or nothing to train" ;;
    esac
    REST=("$@")
    refuse_options "$@"
}

# ask URL: print what a server answers. A proxy is never asked.
ask() { curl --silent --noproxy '*' --max-time 5 "$@"; }

# rollout_command HOST GPUS [TAKEN]: set ROLLOUTS to the command of the rollout server on ROLLOUT_GPUS, or on GPUS such as
# 4,5. Others have those that are TAKEN. With ROLLOUT_SERVER=trl, `trl vllm-serve` starts vLLM's server. It adds the options
# on weights and log probabilities itself.
rollout_command() {
    local each gpus gpu taken=${3:-}
    ROLLOUT_GPUS=${ROLLOUT_GPUS:-$2}
    IFS=, read -ra each <<<"$ROLLOUT_GPUS"
    for gpu in "${each[@]}"; do
        [[ $gpu =~ ^(0|[1-9][0-9]?|(GPU|MIG)-.+)$ ]] ||
            die "ROLLOUT_GPUS=$ROLLOUT_GPUS: '$gpu' is no GPU: write numbers with commas, such as 4,5"
        [[ ,$taken, != *,$gpu,* ]] ||
            die "ROLLOUT_GPUS=$ROLLOUT_GPUS: GPU $gpu is that of the training or of the judge, or is here twice: name others"
        taken+=,$gpu
    done
    gpus=$((${#each[@]} / (ROLLOUT_COPIES ? ROLLOUT_COPIES : 1))) # of one copy
    ((gpus * ROLLOUT_COPIES == ${#each[@]})) ||
        die "ROLLOUT_COPIES=$ROLLOUT_COPIES does not divide the ${#each[@]} GPUs of the rollout server: set a divisor"
    case ${ROLLOUT_SERVER:-vllm} in
    vllm)
        ROLLOUTS=(
            # Weights arrive in 2 GiB that vLLM does not count: of its own, it would take 0.92.
            vllm serve "$POLICY" --host "$1" --port "$PORT" --tensor-parallel-size "$gpus" --max-model-len 8192
            --gpu-memory-utilization 0.9
            --data-parallel-size "$ROLLOUT_COPIES" --generation-config vllm --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1
        )
        ;;
    trl)
        ROLLOUTS=(
            trl vllm-serve --model "$POLICY" --host "$1" --port "$PORT" --tensor_parallel_size "$gpus"
            --data_parallel_size "$ROLLOUT_COPIES" --max_model_len 8192 --generation-config vllm
        )
        ;;
    *) die "ROLLOUT_SERVER is ${ROLLOUT_SERVER}: set it to vllm or trl" ;;
    esac
    need "${ROLLOUTS[0]}"
}

# judge_command HOST [OPTION...]: set JUDGE_ARGUMENTS to the arguments of a training that name the judge. Unless JUDGE_URL
# names one, set it, and set JUDGE_SERVER to the command of the judge that the script will start. An answer of a benchmark may need a context of 65,536 tokens. Without
# `--generation-config vllm`, the server would sample by the model's own top-k and top-p.
judge_command() {
    if [[ -z $JUDGE_URL ]]; then
        STARTS_JUDGE=yes
        JUDGE_CONTEXT=${JUDGE_CONTEXT:-65536}
        JUDGE_URLS=("http://$1:$((PORT + 1))/v1")
        JUDGE_URL=${JUDGE_URLS[0]}
        JUDGE_SERVER=(
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE=120 vllm serve "$JUDGE_MODEL" --host "$1" --port "$((PORT + 1))" "${@:2}"
            --max-model-len "$JUDGE_CONTEXT" --generation-config vllm --enable-prompt-tokens-details
            --structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'
        )
    fi
    JUDGE_ARGUMENTS=(--judge_url "${JUDGE_URLS[@]}" --judge_model "$JUDGE_MODEL")
    [[ -z ${JUDGE_CONTEXT:-} ]] || JUDGE_ARGUMENTS+=(--judge_context "$JUDGE_CONTEXT")
}

# is_here URL: tell whether a server is on this machine, so that it holds GPUs of this machine.
is_here() { [[ $(host_of "$1") =~ ^(127\.|localhost$|::1$) ]]; }

# judge_is_here: tell whether a judge is on this machine.
judge_is_here() {
    local url
    for url in "${JUDGE_URLS[@]}"; do is_here "$url" && return; done
    return 1
}

# start_judge GPUS [COMMAND...]: start the judge, or check those that are served already. COMMAND is what sets the
# environment of the judge (default: env).
start_judge() {
    local gpus=$1
    shift
    (($#)) || set -- env
    if [[ -n $STARTS_JUDGE ]]; then
        start judge "$@" "${NO_KEYS[@]}" CUDA_VISIBLE_DEVICES="$gpus" "${JUDGE_SERVER[@]}"
    else
        check_judges
    fi
}

# wait_judge: wait until a judge that this script has started is ready.
wait_judge() { [[ -z $STARTS_JUDGE ]] || wait_healthy judge "${JUDGE_URL%/v1}" "$JUDGE_MODEL"; }

# check_judges: wait until each judge that is served already answers. Stop the script if one does not. A list of models
# decides nothing: routers and aliases serve what they do not list.
check_judges() {
    local url deadline=$((SECONDS + START_SECONDS))
    for url in "${JUDGE_URLS[@]}"; do
        say "waiting for the judge at $url, $START_SECONDS s at most (START_SECONDS)"
        until ask_judge "$url" --output /dev/null; do
            ((SECONDS < deadline)) || die "no judge answers at $url: $NOT_THERE"
            sleep "$POLL_SECONDS"
        done
        if lists "$(ask_judge "$url" --fail || true)" "$JUDGE_MODEL"; then
            say "the judge is ready"
        else # an endpoint that wants a key, or that does not list the model
            say "something answers at $url; the training checks whether it serves $JUDGE_MODEL"
        fi
    done
}

# lists MODELS MODEL: tell whether a server's list of models, which is JSON, holds a model.
lists() {
    local model=${2//\\/\\\\}
    [[ $1 == *"\"${model//\"/\\\"}\""* ]]
}

# ask_judge URL OPTION...: ask a judge for its models, as `ask` does, by the environment's proxy if it is elsewhere.
ask_judge() {
    local url=$1
    shift
    if is_here "$url"; then ask "$@" "$url/models"; else curl --silent --max-time 5 "$@" "$url/models"; fi
}

# provide_judge GPUS: start the judge if it is not served already, and wait until it is ready.
provide_judge() {
    if [[ -n $STARTS_JUDGE ]]; then
        need vllm
        check_free "${JUDGE_URL%/v1}"
        download "$JUDGE_MODEL"
    fi
    start_judge "$1"
    wait_judge
}

# serve_judge GPUS: the role `judge`. Serve the judge until this script is ended.
serve_judge() {
    [[ -z $PLAN_ONLY ]] || die "a judge has no plan: leave out --dry_run"
    [[ -n $STARTS_JUDGE ]] || die "JUDGE_URL=$JUDGE_URL names a judge already: unset it to serve one here"
    need curl hf
    provide_judge "$1"
    say "to use this judge: export JUDGE_URL=$JUDGE_URL JUDGE_MODEL=$JUDGE_MODEL"
    serve_until_ended
}

# serve_until_ended: wait for a signal, or until a server ends by itself.
serve_until_ended() {
    say "serving until Ctrl-C"
    wait -n "${SERVERS[@]}" || true
    die "a server has ended; see $LOGS"
}

# split_options OPTION...: sort the options of the role `data` into RESPONSES, for generate_responses.py, and RUBRICS, for
# generate_rubrics.py. Those of the judge's server are for both. SOURCE gets those that say which prompts of a data set.
split_options() {
    local word responses='' rubrics='' source=''
    RESPONSES=() RUBRICS=() SOURCE=()
    for word; do
        [[ $word != --* ]] || source=''
        case ${word%%=*} in
        --dataset[_-]config | --dataset[_-]train[_-]split) responses=yes rubrics='' source=yes ;;
        --judge[_-]guard | --judge[_-]decoding | --judge[_-]free[_-]tokens | --judge[_-]samples) responses=yes rubrics='' ;;
        --judge[_-]*) responses=yes rubrics=yes ;;
        --generic | --keep[_-]apart) responses='' rubrics=yes ;;
        --*) responses=yes rubrics='' ;;
        esac
        [[ -z $responses ]] || RESPONSES+=("$word")
        [[ -z $rubrics ]] || RUBRICS+=("$word")
        [[ -z $source ]] || SOURCE+=("$word")
    done
}

# make_data JUDGE_GPUS POLICY_GPUS [OPTION...]: the role `data`. Make a training set from a file of prompts: POLICY writes
# responses, and the judge orders them and writes rubrics.
make_data() {
    local judge_gpus=$1 gpus=$2 sampler=${SAMPLER_URL:-http://127.0.0.1:$PORT/v1} prompts output responses
    shift 2
    if [[ " ${REST[*]} " == *" --help "* || ${REST[0]:-} == -h ]]; then
        python recipes/generate_responses.py --help
        exec python recipes/generate_rubrics.py --help
    fi
    [[ ${#REST[@]} -ge 2 && ${REST[1]} != -* && ${REST[2]:---} == --* ]] ||
        die "name two files, and options after them: $0 data PROMPTS.jsonl TRAINING_SET.jsonl [--keep_apart 12 ...]"
    split_options "${REST[@]:2}"
    prompts=${REST[0]} output=${REST[1]}
    [[ $output != "$prompts" ]] || die "$output would be written over: name another file for the training set"
    [[ $prompts != *.json* || -f $prompts ]] || die "there is no file $prompts in $PWD, where this script works"
    [[ $output == *.jsonl || $output == *.parquet ]] || die "$output must end in .jsonl or .parquet: name another file"
    responses=${output%.*}_no_rubrics.${output##*.}
    local judge=(--judge_url "${JUDGE_URLS[@]}" --judge_model "$JUDGE_MODEL")
    local sample=(
        python recipes/generate_responses.py --dataset_name "$prompts" --output_file "$responses" "${judge[@]}"
        --sampler_url "$sampler" --sampler_model "$POLICY" --sampler_request '{"top_k": 20}' --recipe "$RECIPE"
        "${RESPONSES[@]}"
    )
    local write=(python recipes/generate_rubrics.py --output_file "$output" "${judge[@]}" "${RUBRICS[@]}" --dataset_name)
    need curl hf rankbuffer-data
    # The dry runs refuse options and prompts that cannot work before any weights are loaded.
    "${sample[@]}" --dry_run
    "${write[@]}" "$prompts" "${SOURCE[@]}" --dry_run
    [[ -z $PLAN_ONLY ]] || exit 0
    if [[ -z ${SAMPLER_URL:-} ]]; then
        need vllm
        check_free "http://127.0.0.1:$PORT"
        download "$POLICY"
    fi
    provide_judge "$judge_gpus"
    if [[ -z ${SAMPLER_URL:-} ]]; then
        start sampler env "${NO_KEYS[@]}" CUDA_VISIBLE_DEVICES="$gpus" \
            vllm serve "$POLICY" --host 127.0.0.1 --port "$PORT" --max-model-len 8192 --generation-config vllm "$@"
        wait_healthy sampler "http://127.0.0.1:$PORT" "$POLICY"
    fi
    # 3: some queries failed, and the others are written. One prompt that always fails must not end all.
    "${sample[@]}" || (($? == 3))
    "${write[@]}" "$responses" || (($? == 3))
    rankbuffer-data check "$output" --tokenizer "$POLICY"
}

# estimate JUDGE_GPUS: the role `estimate`. Say what the training will cost, after a few questions to the judge; where no
# judge is served and none can be, as on a laptop, by the characters of the data alone.
estimate() {
    [[ -z $PLAN_ONLY ]] || show_plan "${PROCESSES:-1}" "${ARGUMENTS[@]}"
    ARGUMENTS+=(--num_processes "${PROCESSES:-1}")
    if [[ -n $STARTS_JUDGE ]] && ! command -v vllm >/dev/null; then
        say "no JUDGE_URL and no vLLM here, so no judge is asked: an estimate by the characters of the data"
        python recipes/train_rankbuffer.py "${ARGUMENTS[@]}" --dry_run
        return
    fi
    need curl hf
    python recipes/train_rankbuffer.py "${ARGUMENTS[@]}" --dry_run >/dev/null # refuses what cannot work
    provide_judge "$1"
    python recipes/train_rankbuffer.py "${ARGUMENTS[@]}" --preflight_only true
}

# other_roles JUDGE_GPUS POLICY_GPUS [OPTION...]: unless ROLE is to train, play it and end the script. The options are those
# of the policy's server.
other_roles() {
    case $ROLE in
    judge) serve_judge "$1" ;;
    data) make_data "$@" ;;
    estimate) estimate "$1" ;;
    train) return ;;
    esac
    exit
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
    local name=$1 log=$LOGS/$1.log attempt
    shift
    mkdir -p "$LOGS"
    touch "$log"
    FIRST_LINE[$name]=$(($(wc -l <"$log") + 3)) # the last line may have no line break
    attempt=$(($(grep -c '^=== .*, attempt ' "$log" || true) + 1))
    printf '\n=== %s, attempt %d\n' "$(date --iso-8601=seconds)" "$attempt" >>"$log"
    say "starting $name, log in $log: $(sed -E 's/(--hub[_-]token[= ])[^ ]+/\1.../g' <<<"$*")"
    setsid "$@" </dev/null >>"$log" 2>&1 &
    SERVERS[$name]=$!
    echo "$!" >&"$GUARDED"
}

# wait_healthy NAME URL MODEL: wait until the server answers. Stop the script if the server ends, if START_SECONDS are
# over, or if the server that answers has another model.
wait_healthy() {
    local name=$1 url=$2 model=$3 deadline=$((SECONDS + START_SECONDS)) models
    until ask --fail --output /dev/null "$url/health"; do
        check_alive "$name"
        ((SECONDS < deadline)) ||
            die "$name at $url was not ready after $START_SECONDS s (START_SECONDS)${SERVED_BY:+: $SERVED_BY}"
        sleep "$POLL_SECONDS"
    done
    check_alive "$name" # else another server answers
    models=$(ask "$url/v1/models" || true)
    lists "$models" "$model" || die "the server at $url does not serve $model, so it is not our $name: $models"
    say "$name is ready"
}

# check_alive NAME: stop the script if a server that it started has ended.
check_alive() {
    [[ -z ${SERVERS[$1]:-} ]] || kill -0 "${SERVERS[$1]}" 2>/dev/null && return
    tail --lines="+${FIRST_LINE[$1]}" "$LOGS/$1.log" | tail -n 20 >&2
    die "$1 ended before it was ready; its whole log is $LOGS/$1.log"
}

# train NAME COMMAND...: run the command, show what it writes and return its exit status. `accelerate` exits with 1 for every
# fault. So the training writes the status 75, and the further arguments of a resume, into the file RANKBUFFER_STATUS_FILE.
train() {
    local left=$RETRIES status deadline words more=()
    if [[ -n ${RANKBUFFER_STATUS_FILE:-} ]]; then # another script waits for this one, and reads the file
        train_once "$@"
        return "$status"
    fi
    mkdir -p "$LOGS"
    RANKBUFFER_STATUS_FILE=$(cd "$LOGS" && pwd)/$1.status
    export RANKBUFFER_STATUS_FILE
    while true; do
        : >"$RANKBUFFER_STATUS_FILE"
        train_once "$@" "${more[@]}"
        if ((status)) && read -r -a words <"$RANKBUFFER_STATUS_FILE"; then
            status=${words[0]}
            # An attempt that failed before its first step names no arguments. It was to resume as the one before it.
            ((${#words[@]} == 1)) || more=("${words[@]:1}")
        fi
        ((status == 75 && left > 0)) || return "$status"
        deadline=$((SECONDS + RETRY_SECONDS)) PAUSED=yes
        say "the judge or the rollout server has failed: again in $RETRY_SECONDS s, $left times at most"
        left=$((left - 1))
        while ((SECONDS < deadline)) && [[ -z $WARNED ]]; do sleep "$POLL_SECONDS" || true; done
        PAUSED=
        [[ -z $WARNED ]] || return 0 # as a training that is stopped: slurm.sh then requeues the job
    done
}

# train_once NAME COMMAND...: run the command, show what it writes, and set `status` to its exit status.
train_once() {
    status=0
    start "$@"
    TRAINING=${SERVERS[$1]}
    setsid tail --follow --lines="+${FIRST_LINE[$1]}" --sleep-interval=0.2 --pid="$TRAINING" "$LOGS/$1.log" &
    FOLLOWER=$!
    # A signal ends a wait with a status of its own. Once the training has ended, `wait` still returns its status.
    while kill -0 "$TRAINING" 2>/dev/null; do wait "$TRAINING" || true; done
    wait "$TRAINING" || status=$?
    TRAINING=
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
    [[ -z $WARNED ]] || ((SECONDS - WARNED > 5)) || return 0 # the same warning, sent by a terminal and an init, say
    [[ -n $TRAINING$PAUSED && -z $WARNED ]] || exit 143
    WARNED=$SECONDS
    [[ -z $PAUSED ]] || return 0
    [[ -n ${TELL_LAUNCHER:-} ]] || { told=$(children "$TRAINING") && signal=TERM; }
    # A launcher that has no children yet has nothing to save, and it ends.
    for pid in ${told:-$TRAINING}; do kill -"$signal" "$pid" 2>/dev/null || true; done
    say "stopping: the training writes a checkpoint; again after 5 s to stop at once"
}

# guard: read process groups until the script has ended, and end them.
guard() {
    local pid pids=() groups deadline
    trap '' TERM INT HUP USR1
    mapfile -t groups
    deadline=$((SECONDS + STOP_SECONDS))
    for pid in "${groups[@]}"; do
        # shellcheck disable=SC2207 # one word per process
        pids+=($(family "$pid"))
        kill -TERM -- "-$pid" 2>/dev/null || true
    done
    ((${#pids[@]})) || return 0
    while kill -0 "${pids[@]}" 2>/dev/null && ((SECONDS < deadline)); do sleep 0.2; done
    kill -KILL "${pids[@]}" 2>/dev/null || true
}

stop() {
    trap '' TERM INT HUP USR1
    exec {GUARDED}>&-
    wait "$GUARD" ${FOLLOWER:+"$FOLLOWER"} || true
}

need ps setsid # to find the processes that get a signal, and to end them all
set -m # a process group of its own, which a SIGKILL of the script's group does not reach
coproc { guard; }
set +m
GUARD=$COPROC_PID GUARDED=${COPROC[1]} # bash closes this end of the pipe in all other processes
trap stop EXIT
trap warn TERM INT HUP USR1
trap : PIPE
