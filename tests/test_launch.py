"""The launch scripts: order of starts, environment, arguments by the real parsers, and nothing that is left behind."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from helpers.launching import ROOT, Launch, launch
from trl.scripts.vllm_serve import ScriptArguments, build_command, make_parser

from rankbuffer_trl.data.check import CheckSettings, later
from rankbuffer_trl.data.tokens import TokenCounter
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.training.batches import Batches
from rankbuffer_trl.training.parser import RecipeParser

pytestmark = pytest.mark.slow

FOLDER = ROOT / "recipes" / "launch"
JUDGE = "Qwen/Qwen3-30B-A3B-Instruct-2507"
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_ID": "7"}
HOSTS = {"SERVE_HOST": "10.0.0.2", "TRAIN_HOST": "10.0.0.1"}
REMOTE = {"JUDGE_URL": "http://10.0.0.2:8001/v1"}
SEED = ["--seed", "7"]  # further arguments reach the training


def training(launched: Launch, processes: int):
    """The parsed arguments of a whole run's training: those of its dry run, and the paper's batch."""
    assert launched.status == 0, launched.output
    assert launched.left == []
    names = [call.name for call in launched.calls if call.name in ("python", "vllm", "accelerate")]
    assert names == sorted(names, key=["python", "vllm", "accelerate"].index)
    call = launched.of("accelerate")[-1]
    accelerate = launch_command_parser().parse_args(call.argv[1:])
    assert call.argv[0] == "launch"
    assert (accelerate.num_processes or load_config_from_file(accelerate.config_file).num_processes) == processes
    assert accelerate.training_script == "recipes/train_rankbuffer.py"
    assert bool(accelerate.quiet) == (processes == 1), "it has no effect on several processes"

    dry = launched.calls[[call.name for call in launched.calls].index("python")]
    plan = ["--dry_run", "--num_processes", str(processes)]
    assert dry.argv == ["recipes/train_rankbuffer.py", *accelerate.training_script_args, *plan]
    parsed = RecipeParser().parse_args_and_config([*accelerate.training_script_args, *plan])
    args = parsed[1]
    assert args.seed == 7
    assert (args.generation_batch_size, args.queries_per_generation, Batches(args, 1000).steps) == (160, 20, 200)
    return accelerate, *parsed


def servers(launched: Launch) -> dict:
    """Judge and rollout server, checked against what TRL starts and what the trainer is told."""
    found = {call.value("--port"): call for call in launched.of("vllm")}
    judge, rollouts = found.pop("8001"), found.pop("8000")
    assert not found
    for call in (judge, rollouts):
        assert call.argv[0] == "serve"
        gpus = call.env["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(gpus) == int(call.value("--tensor-parallel-size"))
    assert not set(judge.env["CUDA_VISIBLE_DEVICES"].split(",")) & set(rollouts.env["CUDA_VISIBLE_DEVICES"].split(","))

    theirs = build_command(ScriptArguments(rollouts.argv[1]))
    for option in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
        assert rollouts.value(option) == theirs[theirs.index(option) + 1]
    assert rollouts.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_SERVER_DEV_MODE" not in judge.env and "--weight-transfer-config" not in judge.argv
    return {"judge": judge, "rollouts": rollouts}


def test_one_node_shares_its_gpus_and_stays_on_loopback(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED, RECIPE="recipes/beyond/listwise.yaml", JUDGE_CONTEXT="40960")
    found = servers(done)
    _, _, args, model = training(done, 4)
    assert args.method == "listwise" and found["judge"].value("--max-model-len") == "40960"
    gpus = [call.env["CUDA_VISIBLE_DEVICES"] for call in (*found.values(), done.of("accelerate")[0])]
    assert sorted(",".join(gpus).split(",")) == list("01234567") and gpus[2].count(",") == 3
    assert {call.value("--host") for call in found.values()} == {"127.0.0.1"}
    assert {call.env["VLLM_HOST_IP"] for call in (found["rollouts"], done.of("accelerate")[0])} == {"127.0.0.1"}
    assert args.judge_url == ["http://127.0.0.1:8001/v1"] and args.judge_model == found["judge"].argv[1]
    assert (args.vllm_mode, args.vllm_server_host, args.vllm_server_port) == ("server", "127.0.0.1", 8000)
    assert model.model_name_or_path == found["rollouts"].argv[1]
    assert int(found["rollouts"].value("--max-model-len")) == args.max_prompt_length + args.max_completion_length
    assert set(done.logs) == {"judge", "rollouts"}


def test_two_nodes_meet_at_the_addresses_given(tmp_path):
    served = launch(tmp_path / "serve", "two_nodes.sh", "serve", then=has("engine", 2), **HOSTS)
    found = servers(served)
    assert served.status == 143 and served.left == []
    assert {call.value("--host") for call in found.values()} == {"10.0.0.2"}
    gpus = ",".join(call.env["CUDA_VISIBLE_DEVICES"] for call in found.values())
    assert sorted(gpus.split(",")) == list("01234567")

    answering(tmp_path / "train", {"8000": "Qwen/Qwen3-8B", "8001": JUDGE})
    trained = launch(tmp_path / "train", "two_nodes.sh", "train", *SEED, **HOSTS)
    assert trained.of("vllm") == []
    _, _, args, _ = training(trained, 8)
    assert args.judge_url == ["http://10.0.0.2:8001/v1"] and args.vllm_server_base_url == "http://10.0.0.2:8000"
    assert trained.of("accelerate")[0].env["VLLM_HOST_IP"] == "10.0.0.1"


def answering(folder: Path, models: dict[str, str]) -> None:
    """Let servers that nobody here has started answer at some ports, each with its model."""
    folder.mkdir()
    for port, model in models.items():
        (folder / f"ready-{port}").write_text(json.dumps({"data": [{"id": model}]}))


def has(name: str, count: int):
    """Whether so many of a name have been started."""
    return lambda calls: sum(call.name == name and not call.got for call in calls) >= count


def test_slurm_serves_on_one_node_and_trains_on_the_others(tmp_path):
    done = launch(tmp_path, "slurm.sh", *SEED, OUTPUT=str(tmp_path / "run"), **SLURM)
    found = servers(done)
    assert {call.value("--host") for call in found.values()} == {"10.0.0.0"}
    accelerate, _, args, _ = training(done, 16)
    assert (accelerate.num_machines, accelerate.main_process_ip) == (2, "10.0.0.1")
    assert accelerate.deepspeed_multinode_launcher == "standard"
    launchers = done.of("accelerate")
    assert sorted(call.value("--machine_rank") for call in launchers) == ["0", "1"]
    assert {call.env["VLLM_HOST_IP"] for call in launchers} == {"10.0.0.1"}
    steps = [call.argv[call.argv.index("--overlap") :] for call in done.of("srun")]
    assert [next(word for word in step if word.startswith("--nodelist")) for step in steps if "bash" in step] == [
        "--nodelist=n1,n2"
    ]
    assert args.resume_from_checkpoint is None
    assert done.of("scontrol")[-1].argv[0] == "show", "a run that has ended is not queued again"


def test_the_documented_trl_command_starts_the_same_server(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED)
    rollouts = servers(done)["rollouts"]
    text = (ROOT / "recipes" / "README.md").read_text()
    (command,) = re.findall(r"^CUDA_VISIBLE_DEVICES=4,5 trl vllm-serve (.*)$", text, re.MULTILINE)
    arguments, rest = make_parser().parse_args_and_config(shlex.split(command), return_remaining_strings=True)
    theirs = build_command(arguments, rest)
    assert theirs[theirs.index("serve") + 1] == rollouts.argv[1]
    for option in [word for word in rollouts.argv if word.startswith("--")]:
        assert rollouts.value(option) == theirs[theirs.index(option) + 1], option


@pytest.mark.parametrize(
    ("script", "arguments", "environment"),
    [("one_node.sh", SEED, {}), ("two_nodes.sh", ["serve"], HOSTS), ("slurm.sh", SEED, SLURM)],
)
def test_one_variable_takes_trls_command_for_the_rollouts(tmp_path, script, arguments, environment):
    environment = environment | {"OUTPUT": str(tmp_path / "run")}
    then = has("engine", 2) if script == "two_nodes.sh" else None
    plain = launch(tmp_path / "plain", script, *arguments, then=then, **environment)
    theirs = launch(tmp_path / "trl", script, *arguments, then=then, ROLLOUT_SERVER="trl", **environment)
    assert plain.of("trl") == [] and theirs.status == plain.status, theirs.output
    (call,) = theirs.of("trl")
    assert call.argv[0] == "vllm-serve"
    given, rest = make_parser().parse_args_and_config(call.argv[1:], return_remaining_strings=True)
    command = build_command(given, rest)
    (ours,) = (each for each in plain.of("vllm") if each.value("--port") == "8000")
    assert command[command.index("serve") + 1] == ours.argv[1]
    for option in [word for word in ours.argv if word.startswith("--")]:
        assert ours.value(option) == command[command.index(option) + 1], option
    assert call.env == ours.env
    assert '"--enable-scale-out"' in inspect.getsource(build_command), "recipes/README.md says that TRL adds it"


def test_weights_are_there_before_a_server_starts(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED, POLICY=str(tmp_path))
    names = [call.name for call in done.calls if call.name in ("python", "hf", "vllm")]
    assert names == ["python", "hf", "vllm", "vllm"], "a policy in a folder is not downloaded"
    assert done.of("hf")[0].argv == ["download", JUDGE]
    both = launch(tmp_path / "both", "one_node.sh", *SEED)
    assert [call.argv[1] for call in both.of("hf")] == ["Qwen/Qwen3-8B", JUDGE]


def test_a_server_that_is_there_already_is_not_taken_for_ours(tmp_path):
    answering(tmp_path / "early", {"8001": JUDGE})
    done = launch(tmp_path / "early", "one_node.sh", *SEED)
    assert done.status == 1 and "something already listens at http://127.0.0.1:8001" in done.output
    assert done.of("vllm") == done.of("hf") == []

    done = launch(tmp_path / "late", "one_node.sh", *SEED, STOLEN="8001")
    assert done.status == 1 and "judge ended before it was ready" in done.output
    assert "address already in use" in done.output and done.of("accelerate") == [] and done.left == []

    answering(tmp_path / "other", {"8000": "Qwen/Qwen3-4B", "8001": JUDGE})
    done = launch(tmp_path / "other", "two_nodes.sh", "train", *SEED, **HOSTS)
    assert done.status == 1 and done.of("accelerate") == []
    assert (
        'does not serve Qwen/Qwen3-8B, so it is not our rollouts: {"data": [{"id": "Qwen/Qwen3-4B"}]}' in done.output
    )


def test_slurm_refuses_an_address_that_other_nodes_cannot_reach(tmp_path):
    done = launch(tmp_path, "slurm.sh", ADDRESS="127.0.1.", **SLURM)
    assert done.status == 1 and "SERVE_HOST=127.0.1.0 is a loopback address" in done.output
    assert done.of("python") == done.of("vllm") == []
    environment = SLURM | HOSTS | {"ADDRESS": "127.0.1.", "OUTPUT": str(tmp_path / "run")}
    given = launch(tmp_path / "given", "slurm.sh", *SEED, **environment)
    assert given.status == 0 and servers(given)["judge"].value("--host") == "10.0.0.2"


def test_a_missing_command_is_named_before_anything_starts(tmp_path):
    (tmp_path / "few").mkdir()
    for name in ("bash", "dirname", "basename"):
        (tmp_path / "few" / name).symlink_to(shutil.which(name))
    done = launch(tmp_path / "run", "one_node.sh", PATH=str(tmp_path / "few"))
    assert done.status == 1 and "the command curl is not on PATH: install it first" in done.output
    assert done.calls == []


def test_the_judges_of_the_scripts_hold_what_the_check_asks_for(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED)
    args = training(done, 4)[2]
    settings = CheckSettings(
        guard=args.judge_guard,
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        free_tokens=args.judge_free_tokens,
    )
    prompt = [{"role": "user", "content": "x" * 3 * args.max_prompt_length}]
    rubrics = (Rubric("A rubric of about thirty words, " * 5, 5),) * 5
    needed = later(Query("long", prompt, rubrics), TokenCounter(), settings)
    contexts = re.findall(r"JUDGE_CONTEXT:-(\d+)", "".join(map(Path.read_text, FOLDER.glob("*.sh"))))
    assert len(contexts) == 3, "the scripts that start a judge"
    assert needed <= min(map(int, contexts))


def test_one_gpu_holds_policy_and_vllm(tmp_path):
    done = launch(tmp_path, "single_gpu_lora.sh", *SEED, **REMOTE)
    _, _, args, model = training(done, 1)
    assert model.use_peft and model.lora_r == 32
    assert (args.vllm_mode, args.vllm_gpu_memory_utilization) == ("colocate", 0.45)
    assert args.judge_url == ["http://10.0.0.2:8001/v1"]


@pytest.mark.parametrize(("script", "ranks", "environment"), [("one_node.sh", 1, {}), ("slurm.sh", 2, SLURM)])
def test_sigterm_reaches_the_training_processes_alone_and_their_checkpoint_is_waited_for(
    tmp_path, script, ranks, environment
):
    environment = environment | {"OUTPUT": str(tmp_path / "run"), "TRAINS": "yes"}
    done = launch(tmp_path, script, then=has("rank", ranks), **environment)
    assert done.status == 0, done.output
    assert done.left == []
    told = [call.name for call in done.calls if call.got]
    assert told == ["rank"] * ranks, "the launcher kills its children after 30 seconds"
    if script == "slurm.sh":
        assert done.of("scontrol")[-1].argv == ["requeue", "7"]


SOON_OVER = """
source recipes/launch/servers.sh
children() { kill "$1"; while kill -0 "$1" 2>/dev/null; do sleep 0.01; done; }  # the training ends while `warn` runs
status=0
train "$PYTHON" -c 'import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
print("started", flush=True)
signal.pause()' || status=$?
echo "status $status"
"""


def test_a_training_that_ends_at_once_after_a_signal_keeps_its_exit_status():
    command = ["bash", "-euo", "pipefail", "-c", SOON_OVER]
    run = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert run.stdout.readline() == "started\n"
        run.terminate()
        assert run.communicate(timeout=60)[0] == "status 3\n"
    finally:
        run.kill()


def test_slurm_goes_on_from_a_checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-10" / "trainer_state.json").touch()
    done = launch(tmp_path / "stand-ins", "slurm.sh", OUTPUT=str(tmp_path / "run"), **SLURM)
    assert done.of("accelerate")[0].value("--resume_from_checkpoint") == "true"


def test_a_server_that_dies_while_it_starts_ends_everything_with_its_last_words(tmp_path):
    done = launch(tmp_path, "one_node.sh", FAILS="8000")
    assert done.status == 1
    assert "out of memory, of course" in done.output and "rollouts ended before it was ready" in done.output
    assert done.of("accelerate") == [] and done.left == []


def test_a_server_that_is_never_ready_ends_everything(tmp_path):
    done = launch(tmp_path, "two_nodes.sh", "train", START_SECONDS="1", **HOSTS)
    assert done.status == 1 and "was not ready after 1 s" in done.output
    assert done.of("accelerate") == [] and done.left == []


def test_what_the_dry_run_refuses_starts_nothing(tmp_path):
    done = launch(tmp_path, "one_node.sh", REFUSES="1")
    assert done.status == 1
    assert [call.name for call in done.calls] == ["python"]


@pytest.mark.parametrize(
    ("script", "arguments", "environment", "message"),
    [
        ("two_nodes.sh", [], HOSTS, "say what this machine does"),
        ("two_nodes.sh", ["serve"], {}, "SERVE_HOST: set it to the address"),
        ("two_nodes.sh", ["serve"], {"SERVE_HOST": "0.0.0.0"}, "would open the servers to every network"),
        ("two_nodes.sh", ["train"], HOSTS | {"TRAIN_HOST": "localhost"}, "TRAIN_HOST=localhost is a loopback address"),
        ("one_node.sh", [], {"ROLLOUT_SERVER": "sglang"}, "ROLLOUT_SERVER is sglang: set it to vllm or trl"),
        ("single_gpu_lora.sh", [], {}, "JUDGE_URL: set it"),
        ("slurm.sh", [], {}, "this is a script for sbatch"),
        ("slurm.sh", ["--output_dir", "runs/mine"], SLURM, "set OUTPUT=... instead of --output_dir"),
    ],
)
def test_what_is_missing_is_named(tmp_path, script, arguments, environment, message):
    done = launch(tmp_path, script, *arguments, **environment)
    assert done.status == 1 and message in done.output
    assert done.calls == []


def test_the_scripts_are_sound():
    shellcheck = shutil.which("shellcheck", path=f"{sys.prefix}/bin") or shutil.which("shellcheck")
    scripts = sorted(FOLDER.glob("*.sh"))
    assert {script.name for script in scripts} == {
        "servers.sh",
        "one_node.sh",
        "two_nodes.sh",
        "slurm.sh",
        "single_gpu_lora.sh",
    }
    done = subprocess.run(
        [shellcheck, "-x", *scripts], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    for script in scripts:
        text = script.read_text()
        assert "pkill" not in text and "killall" not in text
        if script.name != "servers.sh":
            assert "by arithmetic" in text and "160 rollouts" in text and "has not been run" in text
