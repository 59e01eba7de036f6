"""The launch scripts: order of starts, environment, arguments by the real parsers, and nothing that is left behind."""

import inspect
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from generate_responses import ResponsesConfig
from generate_rubrics import RubricsConfig
from helpers.launching import KEYS, ROOT, Launch, launch
from trl.scripts.vllm_serve import ScriptArguments, build_command, make_parser

from rankbuffer_tools.batch.script import read_settings
from rankbuffer_tools.data.check import CheckSettings, needed_context
from rankbuffer_tools.data.tokens import TokenCounter
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.training._batches import Batches

pytestmark = pytest.mark.slow

POLICY, JUDGE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B-Instruct-2507"
SLURM = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_ID": "7"}
HOSTS = {"SERVE_HOST": "10.0.0.2", "TRAIN_HOST": "10.0.0.1"}
SEED = ["--seed", "7"]  # further arguments reach the training
HERE, AWAY = "http://localhost:9001/v1", "http://10.0.0.9:9001/v1/"
SERVED = {9001: JUDGE}


def has(name: str, count: int):
    """Whether so many of a name have been started."""
    return lambda calls: sum(call.name == name and not call.got for call in calls) >= count


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

    plan = ["--dry_run", "--num_processes", str(processes)]
    assert launched.of("python")[0].argv == ["recipes/train_rankbuffer.py", *accelerate.training_script_args, *plan]
    _, args, model = RecipeParser().parse_args_and_config([*accelerate.training_script_args, *plan])
    assert (args.generation_batch_size, args.queries_per_generation, Batches(args, 1000).steps) == (160, 20, 200)
    assert (args.seed, model.model_name_or_path) == (7, POLICY)
    return accelerate, args, model


def servers(launched: Launch) -> dict:
    """The servers by port, checked against what TRL starts."""
    found = {call.value("--port"): call for call in launched.of("vllm")}
    for call in found.values():
        assert call.argv[0] == "serve"
        gpus = call.env["CUDA_VISIBLE_DEVICES"].split(",")
        sizes = [option for option in ("--tensor-parallel-size", "--data-parallel-size") if option in call.argv]
        assert len(gpus) == math.prod(int(call.value(option)) for option in sizes)
    if rollouts := found.get("8000"):
        theirs = build_command(ScriptArguments(rollouts.argv[1]))
        for option in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
            assert rollouts.value(option) == theirs[theirs.index(option) + 1]
        assert rollouts.env["VLLM_SERVER_DEV_MODE"] == "1"
        assert rollouts.value("--gpu-memory-utilization") == "0.9"
        assert (rollouts.argv[1], rollouts.value("--max-model-len")) == (POLICY, "8192"), "4,096 + 4,096 tokens"
    if judge := found.get("8001"):
        assert "VLLM_SERVER_DEV_MODE" not in judge.env and "--weight-transfer-config" not in judge.argv
    return found


def devices(launched: Launch) -> dict:
    """The GPUs of each server by its port."""
    return {port: call.env["CUDA_VISIBLE_DEVICES"] for port, call in servers(launched).items()}


def test_one_node_shares_its_gpus_and_stays_on_loopback(tmp_path):
    for url, gpus in ("", {"8000": "4,5", "8001": "6,7"}), (HERE, {"8000": "4,5"}), (AWAY, {"8000": "4,5,6,7"}):
        environment = {"JUDGE_URL": url, "RECIPE": "recipes/beyond/listwise.yaml"}
        done = launch(tmp_path, "one_node.sh", *SEED, there=SERVED, **environment)
        _, args, _ = training(done, 4)
        assert devices(done) == gpus
        models = [POLICY] if url else [POLICY, JUDGE]
        assert [call.argv for call in done.of("hf")] == [["download", model] for model in models]
        assert max(done.calls.index(c) for c in done.of("hf")) < min(done.calls.index(c) for c in done.of("vllm"))
        assert done.of("accelerate")[0].env == {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "VLLM_HOST_IP": "127.0.0.1"}
        assert {call.value("--host") for call in done.of("vllm")} == {"127.0.0.1"}
        assert servers(done)["8000"].env["VLLM_HOST_IP"] == "127.0.0.1"
        assert args.judge_context == (None if url else 65536), "known of a judge that the script starts"
        url = url.rstrip("/") or "http://127.0.0.1:8001/v1"
        assert (args.method, args.judge_url, args.judge_model) == ("listwise", [url], JUDGE)
        assert (args.vllm_mode, args.vllm_server_base_url) == ("server", "http://127.0.0.1:8000")


def test_several_judges_are_checked_one_by_one_and_all_reach_the_training(tmp_path):
    judges = "http://localhost:9001/v1/\nhttp://10.0.0.9:9002/v1"
    done = launch(tmp_path, "one_node.sh", *SEED, there={9001: JUDGE, 9002: "other"}, JUDGE_URL=judges)
    _, args, _ = training(done, 4)
    assert args.judge_url == ["http://localhost:9001/v1", "http://10.0.0.9:9002/v1"]
    assert devices(done) == {"8000": "4,5"}, "the judge that is here holds GPUs"
    assert "something answers at http://10.0.0.9:9002/v1; the training checks whether it serves" in done.output
    lost = launch(tmp_path, "one_node.sh", there={9001: JUDGE}, JUDGE_URL=judges, START_SECONDS="1")
    assert lost.status == 1 and "no judge answers at http://10.0.0.9:9002/v1" in lost.output


def test_the_rollout_server_takes_copies_of_the_policy_that_divide_its_gpus(tmp_path):
    for server in ("vllm", "trl"):
        words = {"JUDGE_URL": AWAY, "ROLLOUT_COPIES": "4", "ROLLOUT_SERVER": server}
        done = launch(tmp_path, "one_node.sh", *SEED, there=SERVED, **words)
        (call,) = done.of(server)
        options = [name.replace("-", "_" if server == "trl" else "-") for name in ("tensor-parallel", "data-parallel")]
        assert [call.value(f"--{name}{'_' if server == 'trl' else '-'}size") for name in options] == ["1", "4"]
    for copies in ("3", "0"):
        done = launch(tmp_path, "one_node.sh", ROLLOUT_COPIES=copies)
        assert done.status == 1 and f"ROLLOUT_COPIES={copies} does not divide the 2 GPUs" in done.output


def test_the_data_role_hands_each_option_to_the_programs_that_know_it(tmp_path, monkeypatch):
    words = ["--judge_guard", "false", "--judge_concurrency", "1", "--max_tokens", "9", "--keep_apart", "2"]
    words += ["--dataset_config", "de", "--max_tokens=9"]
    done = launch(tmp_path, "one_node.sh", "data", "in", "out.jsonl", *words, there={9001: JUDGE}, JUDGE_URL=AWAY)
    *checks, responses, rubrics = done.of("python")
    assert [call.argv[-1] for call in checks] == ["--dry_run"] * 2 and checks[1].value("--dataset_name") == "in"
    assert checks[1].value("--dataset_config") == "de" and "de" not in rubrics.argv, "which reads a file"
    assert [call.name for call in done.calls][:3] == ["python", "python", "hf"], "the policy is loaded after both"
    known = []
    for kind, call in (ResponsesConfig, responses), (RubricsConfig, rubrics):
        monkeypatch.setattr(sys, "argv", call.argv)
        known.append(read_settings(kind))  # raises for an option that it does not know
    assert [each.judge_concurrency for each in known] == [1, 1]
    assert (known[0].judge_guard, known[0].max_tokens, known[1].max_tokens) == (False, 9, 1024)
    assert known[0].judge_decoding == "regex", "as the recipe says"
    assert known[1].keep_apart == 2
    only = {f.name for f in fields(ResponsesConfig)} - {f.name for f in fields(RubricsConfig)}
    words = [word for name in sorted(only) if name.startswith("judge_") for word in (f"--{name}", "1")]
    done = launch(tmp_path, "one_node.sh", "data", "in", "out.jsonl", *words, there={9001: JUDGE}, JUDGE_URL=AWAY)
    assert not [word for word in done.of("python")[3].argv if word.removeprefix("--") in only]


def test_the_data_role_goes_on_without_the_queries_that_failed_and_not_without_all(tmp_path):
    for status, calls in (3, 4), (1, 3):
        words = {"JUDGE_URL": AWAY, "SAMPLER_URL": HERE, "REFUSES": str(status)}
        done = launch(tmp_path, "one_node.sh", "data", "in", "out.jsonl", there=SERVED, **words)
        assert len(done.of("python")) == calls, done.output


def test_an_estimate_without_a_judge_or_vllm_is_a_dry_run(tmp_path):
    done = launch(tmp_path, "one_node.sh", "estimate", *SEED, without=("vllm", "curl", "hf"))
    assert done.status == 0 and "no judge is asked" in done.output
    (call,) = done.calls
    assert call.argv[-3:] == ["--num_processes", "4", "--dry_run"]


def test_a_dry_run_of_a_script_starts_nothing(tmp_path):
    node, train, slurm = ["one_node.sh"], ["two_nodes.sh", "train"], ["slurm.sh"]
    for words in (node, [*node, "estimate"], [*node, "data", "in", "out.jsonl"], ["single_gpu_lora.sh"], train, slurm):
        environment = HOSTS if words is train else SLURM if words is slurm else {}
        done = launch(tmp_path, *words, "--dry_run", without=("vllm", "curl", "hf", "accelerate"), **environment)
        assert done.status == 0 and {call.name for call in done.calls} <= {"python", "scontrol", "srun"}, done.output
        assert "--dry_run" in done.of("python")[-1].argv
    done = launch(tmp_path, *node, *SEED, "--dry_run=false", ROLLOUT_COPIES="")
    assert done.of("accelerate"), "it trains"


def test_one_node_trains_and_samples_on_all_gpus_if_the_judge_is_elsewhere(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED, there=SERVED, JUDGE_URL=AWAY, COLOCATE="yes")
    _, args, _ = training(done, 8)
    assert (args.vllm_mode, args.vllm_gpu_memory_utilization, args.vllm_max_model_length) == ("colocate", 0.4, 8192)
    assert done.of("vllm") == [] and done.of("accelerate")[0].env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    for url in ("", HERE):
        refused = launch(tmp_path, "one_node.sh", there=SERVED, JUDGE_URL=url, COLOCATE="yes")
        assert refused.status == 1 and "COLOCATE takes all eight GPUs" in refused.output and refused.calls == []


def test_two_nodes_meet_at_the_addresses_given(tmp_path):
    ours = "http://10.0.0.2:8001/v1"
    for url, gpus in ("", {"8000": "0,1,2,3", "8001": "4,5,6,7"}), (AWAY, {"8000": "0,1,2,3,4,5,6,7"}):
        environment = HOSTS | {"JUDGE_URL": url}
        served = launch(tmp_path, "two_nodes.sh", "serve", then=has("engine", len(gpus)), there=SERVED, **environment)
        assert served.status == 143 and served.left == [] and devices(served) == gpus
        assert {call.value("--host") for call in served.of("vllm")} == {"10.0.0.2"}
        there = {8000: POLICY, 9001 if url else 8001: JUDGE}
        trained = launch(tmp_path, "two_nodes.sh", "train", *SEED, there=there, **environment)
        _, args, _ = training(trained, 8)
        assert (args.judge_url, args.vllm_server_base_url) == ([url.rstrip("/") or ours], "http://10.0.0.2:8000")
        assert trained.of("accelerate")[0].env["VLLM_HOST_IP"] == "10.0.0.1" and trained.of("vllm") == []


def test_a_training_that_lost_its_judge_is_resumed_as_often_as_told(tmp_path):
    environment = {"JUDGE_URL": HERE, "RETRY_SECONDS": "0"}
    for lost, retries, status, starts in (("2", "3", 0, 3), ("9", "2", 75, 3), ("1", "0", 75, 1)):
        more = {"LOSES_JUDGE": lost, "RETRIES": retries}
        done = launch(tmp_path, "one_node.sh", *SEED, there=SERVED, **environment | more)
        first, *again = done.of("accelerate")
        assert (done.status, len(again), done.left) == (status, starts - 1, []), (lost, retries, done.output)
        assert all(call.argv == [*first.argv, "--resume_from_checkpoint", "true"] for call in again)
    refused = launch(tmp_path, "one_node.sh", RETRIES="abc")
    assert refused.status == 1 and "RETRIES=abc is no whole number" in refused.output and refused.calls == []
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    more = {"LOSES_JUDGE": "1", "RETRIES": "1", "OUTPUT": str(tmp_path / "run")}
    more |= {"SLURM_SUBMIT_DIR": str(tmp_path), "LOGS": "logs", "CDPATH": "."}  # with it, `cd logs` prints the folder
    done = launch(tmp_path, "slurm.sh", *SEED, there=SERVED, **SLURM | environment | {"JUDGE_URL": AWAY} | more)
    assert done.status == 0 and len(done.of("accelerate")) == 4, "both nodes are started again, by one srun"
    assert [call.argv[-1] for call in done.of("accelerate")].count("true") == 2
    more |= {"RETRY_SECONDS": "60", "LOSES_JUDGE": "9"}
    waits = lambda calls: any("again in 60 s" in path.read_text() for path in tmp_path.glob("*/output"))  # noqa: E731
    done = launch(tmp_path, "slurm.sh", then=waits, there=SERVED, **SLURM | environment | {"JUDGE_URL": AWAY} | more)
    assert done.status == 0 and done.of("scontrol")[-1].argv == ["requeue", "7"], done.output


def test_slurm_serves_on_one_node_and_trains_on_the_others(tmp_path):
    given = HOSTS | {"ADDRESS": "127.0.1."}  # the nodes resolve their names to loopback addresses
    both = {"8000": "0,1,2,3", "8001": "4,5,6,7"}
    for own, serve, gpus in (
        ({}, "10.0.0.0", both),
        ({"JUDGE_URL": AWAY}, "10.0.0.0", {"8000": "0,1,2,3,4,5,6,7"}),
        (given, "10.0.0.2", both),
    ):
        environment = SLURM | own | {"OUTPUT": str(tmp_path / "run")}
        done = launch(tmp_path, "slurm.sh", *SEED, there=SERVED, **environment)
        accelerate, args, _ = training(done, 16)
        assert {call.value("--host") for call in done.of("vllm")} == {serve} and devices(done) == gpus
        assert args.judge_url == [own.get("JUDGE_URL", f"http://{serve}:8001/v1").rstrip("/")]
        assert (accelerate.num_machines, accelerate.main_process_ip) == (2, "10.0.0.1")
        assert accelerate.deepspeed_multinode_launcher == "standard"
        launchers = done.of("accelerate")
        assert sorted(call.value("--machine_rank") for call in launchers) == ["0", "1"]
        assert {call.env["VLLM_HOST_IP"] for call in launchers} == {"10.0.0.1"}
        lists = [word for call in done.of("srun") if "bash" in call.argv for word in call.argv if "--nodelist" in word]
        assert lists == ["--nodelist=n1,n2"]
        assert args.resume_from_checkpoint is None
        assert done.of("scontrol")[-1].argv[0] == "show", "a run that has ended is not queued again"
    folder = tmp_path / "run [1] of*"
    (folder / "checkpoint-10" / "rankbuffer").mkdir(parents=True)
    for name, resumes in (("trainer_state.json", False), ("rankbuffer/run.json", True)):  # in the order of a save
        (folder / "checkpoint-10" / name).touch()
        again = launch(tmp_path, "slurm.sh", **environment | {"OUTPUT": str(folder)})
        assert ("--resume_from_checkpoint" in again.of("accelerate")[0].argv) == resumes


def test_slurm_makes_the_batch_of_the_recipe_on_any_number_of_nodes_or_refuses(tmp_path):
    for nodes in (1, 5, 3):
        environment = SLURM | {"SLURM_JOB_NODELIST": f"n[0-{nodes}]", "OUTPUT": str(tmp_path / "run")}
        done = launch(tmp_path, "slurm.sh", *SEED, **environment)
        if nodes != 3:
            training(done, 8 * nodes)
    assert done.status == 1 and "3 training nodes cannot make 160 rollouts" in done.output
    told = launch(tmp_path, "slurm.sh", **environment, ACCUMULATION="7")
    assert told.of("python")[0].value("--gradient_accumulation_steps") == "7"


def test_no_server_has_the_key_of_the_judge(tmp_path):
    for (script, *words), own, count in [
        (["one_node.sh", "--hub_token", "hf_secret", "--judge_api_key_env", KEYS[1]], {}, 2),
        (["slurm.sh", f"--judge-api-key-env={KEYS[1]}"], SLURM, 2),
        (["one_node.sh", "data", "in", "out.jsonl"], {}, 2),
        (["one_node.sh", "estimate"], {}, 1),
        (["two_nodes.sh", "serve"], HOSTS, 2),
    ]:
        ours = "" if KEYS[1] in words[-1] else f"judge_api_key_env: '{KEYS[1]}' # ours\n"
        (tmp_path / "mine.yaml").write_text(ours if count == 1 else "base: 'our base.yaml'  # one folder\n")
        (tmp_path / "our base.yaml").write_text(ours)
        own = own | {"RECIPE": str(tmp_path / "mine.yaml"), "OUTPUT": str(tmp_path / "run")} | dict.fromkeys(KEYS, "k")
        done = launch(tmp_path, script, *words, then=has("engine", 2) if "serve" in words else None, **own)
        assert len(done.of("vllm")) == count and "hf_secret" not in done.output, done.output
        for call in done.calls:
            if call.name in ("vllm", "engine", "python", "accelerate"):
                kept = "k" if call.name in ("python", "accelerate") else None
                assert [call.env.get(key) for key in KEYS] == [kept, kept], (script, call)
        if "estimate" in words:
            assert [call.value("--num_processes") for call in done.of("python")] == ["4", "4"]


def test_logs_are_appended_with_date_and_attempt(tmp_path):
    logs = {name: tmp_path / f"{name}.log" for name in ("judge", "rollouts", "training")}
    for path in logs.values():
        path.write_text("of yesterday")
    for fails in ("", "8000"):
        done = launch(tmp_path, "one_node.sh", LOGS=str(tmp_path), FAILS=fails)
        assert "of yesterday" not in done.output
    for name, path in logs.items():
        first, *heads = re.split(r"\n=== \d{4}-\d\d-\d\dT\S+, attempt (\d)\n", path.read_text())
        assert (first, heads[::2]) == ("of yesterday", ["1"] if name == "training" else ["1", "2"])
    assert "#SBATCH --open-mode=append" in (ROOT / "recipes" / "launch" / "slurm.sh").read_text()


def test_one_gpu_gives_the_memory_of_a_judge_elsewhere_to_the_rollouts(tmp_path):
    small = "Qwen/Qwen3-4B-Instruct-2507"
    for url, named, judge, share in (
        ("", {}, small, 0.35),
        (HERE, {"JUDGE_MODEL": small, "JUDGE": "not this"}, small, 0.35),
        (AWAY, {"JUDGE": JUDGE}, JUDGE, 0.45),  # its old name
    ):
        environment = {"JUDGE_URL": url} | named
        done = launch(tmp_path, "single_gpu_lora.sh", *SEED, there={9001: judge}, **environment)
        _, args, model = training(done, 1)
        own = [] if url else ["0.25"]
        assert [call.value("--gpu-memory-utilization") for call in done.of("vllm")] == own
        assert (args.vllm_mode, args.vllm_gpu_memory_utilization, args.judge_model) == ("colocate", share, judge)
        assert model.use_peft and model.lora_r == 32


@pytest.mark.parametrize("listed", ["401", "other"])
def test_a_policy_that_is_served_already_writes_the_responses_and_a_judge_may_list_no_model(tmp_path, listed):
    environment = {"SAMPLER_URL": "http://10.0.0.8/v1", "JUDGE_URL": AWAY}
    done = launch(tmp_path, "one_node.sh", "data", "in", "out.jsonl", there={9001: listed}, **environment)
    assert done.status == 0 and done.of("vllm") == done.of("hf") == []
    assert f"the training checks whether it serves {JUDGE}" in done.output
    *_, responses, rubrics = done.of("python")
    assert responses.value("--sampler_url") == "http://10.0.0.8/v1"
    assert responses.value("--output_file") == rubrics.value("--dataset_name") == "out_no_rubrics.jsonl"
    odd = tmp_path / 'a "good\\bad" policy'
    odd.mkdir()
    names = {"POLICY": str(odd), "JUDGE_MODEL": str(odd), "JUDGE_URL": AWAY}
    own = launch(tmp_path, "one_node.sh", "data", "in", "out.jsonl", there={9001: str(odd)}, **names)
    assert own.status == 0, own.output
    assert own.of("hf") == [], "a policy in a folder is not downloaded"
    assert own.of("vllm")[0].env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_trls_command_starts_the_same_rollout_server(tmp_path):
    (ours,) = (c for c in launch(tmp_path, "one_node.sh", *SEED).of("vllm") if c.value("--port") == "8000")
    (theirs,) = launch(tmp_path, "one_node.sh", *SEED, ROLLOUT_SERVER="trl").of("trl")
    text = (ROOT / "recipes" / "README.md").read_text()
    (documented,) = re.findall(r"^CUDA_VISIBLE_DEVICES=4,5 trl vllm-serve (.*)$", text, re.MULTILINE)
    assert theirs.argv[0] == "vllm-serve" and theirs.env == ours.env
    for words in (theirs.argv[1:], shlex.split(documented)):
        given, rest = make_parser().parse_args_and_config(words, return_remaining_strings=True)
        command = build_command(given, rest)
        assert command[command.index("serve") + 1] == ours.argv[1]
        for option in [word for word in ours.argv if word.startswith("--")]:
            assert ours.value(option) == command[command.index(option) + 1], option
    assert '"--enable-scale-out"' in inspect.getsource(build_command), "recipes/README.md says that TRL adds it"


def test_a_missing_command_is_named_before_anything_starts(tmp_path):
    (tmp_path / "few").mkdir()
    for there, missing in ("bash dirname basename", "ps"), ("ps", "setsid"), ("setsid", "curl"):
        for name in there.split():
            (tmp_path / "few" / name).symlink_to(shutil.which(name))
        done = launch(tmp_path, "one_node.sh", PATH=str(tmp_path / "few"))
        assert done.status == 1 and f"the command {missing} is not on PATH: install it first" in done.output
        assert done.calls == []


def test_the_judges_of_the_scripts_hold_what_the_check_asks_for(tmp_path):
    done = launch(tmp_path, "one_node.sh", *SEED)
    args = training(done, 4)[1]
    settings = CheckSettings(
        guard=args.judge_guard,
        max_prompt_length=args.max_prompt_length,
        max_completion_length=args.max_completion_length,
        free_tokens=args.judge_free_tokens,
    )
    prompt = [{"role": "user", "content": "x" * 3 * args.max_prompt_length}]
    rubrics = (Rubric("A rubric of about thirty words, " * 5, 5),) * 5
    needed = needed_context(Query("long", prompt, rubrics), TokenCounter(), settings, settings.max_completion_length)
    assert needed <= int(servers(done)["8001"].value("--max-model-len"))


@pytest.mark.parametrize(
    ("script", "sent", "piped"),
    [("one_node.sh", signal.SIGHUP, False), ("one_node.sh", signal.SIGINT, True), ("slurm.sh", signal.SIGTERM, False)],
)
def test_a_signal_reaches_the_training_processes_alone_and_their_checkpoint_is_waited_for(
    tmp_path, script, sent, piped
):
    ranks, environment = (2, SLURM) if script == "slurm.sh" else (1, {})
    environment = environment | {"OUTPUT": str(tmp_path / "run"), "TRAINS": "yes"}
    done = launch(tmp_path, script, then=has("rank", ranks), sent=sent, piped=piped, **environment)
    assert done.status == 0, done.output
    assert done.left == []
    told = [call.name for call in done.calls if call.got]
    assert told == ["rank"] * ranks, "the launcher kills its children after 30 seconds"
    assert done.output.count("the checkpoint is written") == (0 if piped else ranks)
    if script == "slurm.sh":
        assert done.of("scontrol")[-1].argv == ["requeue", "7"]


@pytest.mark.parametrize(("script", "ranks", "environment"), [("one_node.sh", 1, {}), ("slurm.sh", 2, SLURM)])
def test_a_kill_of_the_script_ends_servers_and_training(tmp_path, script, ranks, environment):
    environment = environment | {"OUTPUT": str(tmp_path / "run"), "TRAINS": "yes"}
    done = launch(tmp_path, script, then=has("rank", ranks), sent=signal.SIGKILL, **environment)
    assert done.status == -signal.SIGKILL and done.left == []


def test_the_scripts_need_linux_and_help_vllm_in_wsl_and_without_a_toolkit(tmp_path):
    toolkit = tmp_path / "cuda"
    for program, text in (("uname", 'echo "$KERNEL"'), ("cuda/bin/nvcc", "exit 0")):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    show = "${VLLM_USE_FLASHINFER_SAMPLER:-unset} ${VLLM_WSL2_ENABLE_PIN_MEMORY:-unset}"
    for given, said in (
        ({"KERNEL": "6.1.0-generic", "CUDA_HOME": str(toolkit)}, "unset unset"),
        ({"KERNEL": "5.15.1-microsoft-standard-WSL2", "CUDA_HOME": str(tmp_path)}, "0 1"),
        ({"KERNEL": "6.1.0-generic", "CUDA_HOME": str(tmp_path), "VLLM_USE_FLASHINFER_SAMPLER": "1"}, "1 unset"),
        ({"OSTYPE": "darwin23"}, "needs Linux and bash 4.4; elsewhere"),
    ):
        command = ["bash", "-euc", f'source recipes/launch/servers.sh; echo "{show}"']
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **given}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert said in done.stdout + done.stderr and done.returncode == ("OSTYPE" in given), given


def test_a_second_signal_ends_the_script_unless_it_comes_soon():
    for seconds, status in (0, 0), (5, 0), (6, 143):
        # The script takes itself for the training, in a session of its own: it can signal nothing else.
        script = "source recipes/launch/servers.sh; SECONDS=100 TRAINING=$$ WARNED=$((100 - $1)); kill $$"
        command = ["bash", "-euc", script, "-", str(seconds)]
        assert subprocess.run(command, cwd=ROOT, start_new_session=True).returncode == status, seconds


SOON_OVER = """
source recipes/launch/servers.sh
CHILDREN
status=0
train training "$PYTHON" -c 'import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
print("started", flush=True)
signal.pause()' || status=$?
echo "status $status"
"""


@pytest.mark.parametrize(
    "children",
    ['children() { kill "$1"; while kill -0 "$1" 2>/dev/null; do sleep 0.01; done; }', ":"],
    ids=["while warn runs", "without children"],
)
def test_a_training_that_ends_at_once_after_a_signal_keeps_its_exit_status(tmp_path, children):
    """It ends while `warn` looks for its children, or it is a launcher without children and gets the signal itself."""
    environment = os.environ | {"PYTHON": sys.executable, "LOGS": str(tmp_path)}
    command = ["bash", "-euo", "pipefail", "-c", SOON_OVER.replace("CHILDREN", children)]
    run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout.readline() == "started\n"
        run.terminate()
        assert run.communicate(timeout=60)[0] == "status 3\n"
    finally:
        run.kill()


TRAIN, DATA = ("two_nodes.sh", "train"), ("one_node.sh", "data", "in", "out.jsonl")
SOON, BELOW = HOSTS | {"START_SECONDS": "1"}, {"cwd": ROOT / "recipes"}


@pytest.mark.parametrize(
    ("words", "environment", "there", "message", "reaches"),
    [
        (["two_nodes.sh"], HOSTS, {}, "say what this machine does", None),
        (["two_nodes.sh", "judge"], HOSTS, {}, "the judge with the rollout server: .* two_nodes.sh serve", None),
        (["two_nodes.sh", "data", "a", "b"], {}, {}, "recipes/launch/one_node.sh data a b", None),
        (["two_nodes.sh", "estimate"], HOSTS, {}, "one_node.sh estimate .* JUDGE_URL=http://10.0.0.2:8001/v1", None),
        (["slurm.sh", "data", "a", "b"], SLURM, {}, "recipes/launch/one_node.sh data a b", None),
        (["slurm.sh", "estimate"], SLURM, {}, "recipes/launch/one_node.sh estimate", None),
        (["slurm.sh", "judge"], SLURM, {}, "this script starts the judge itself", None),
        (["two_nodes.sh", "serve"], {}, {}, "SERVE_HOST: set it to the address", None),
        (["two_nodes.sh", "serve"], {"SERVE_HOST": "0.0.0.0"}, {}, "would open the servers to every network", None),
        (TRAIN, HOSTS | {"TRAIN_HOST": "localhost"}, {}, "TRAIN_HOST=localhost is a loopback address", None),
        (TRAIN, HOSTS | {"JUDGE_URL": HERE}, SERVED, "JUDGE_URL=localhost is a loopback address", None),
        (["slurm.sh"], SLURM | {"JUDGE_URL": HERE}, SERVED, "JUDGE_URL=localhost is a loopback address", None),
        (["one_node.sh"], {"ROLLOUT_GPUS": "3,6", "JUDGE_URL": HERE}, {}, "GPU 3 is that of the training", None),
        *(
            (["one_node.sh"], {"COLOCATE": "yes", "JUDGE_URL": AWAY, name: "2"}, {}, f"unset {name}", None)
            for name in ("ROLLOUT_GPUS", "ROLLOUT_COPIES")
        ),
        (["single_gpu_lora.sh"], {"ROLLOUT_GPUS": "1"}, {}, "this starts no rollout server: unset ROLLOUT_GPUS", None),
        (["one_node.sh"], {"COLOCATE": "no"}, {}, "COLOCATE=no: set it to yes, or unset it", None),
        (
            ["one_node.sh", "--preflight_only"],
            {},
            {},
            "for a preflight, take the role estimate",
            None,
        ),
        (["one_node.sh"], {"ROLLOUT_GPUS": "4-5"}, {}, "'4-5' is no GPU: write numbers", None),
        (["two_nodes.sh", "serve"], HOSTS | {"ROLLOUT_GPUS": "0,7"}, {}, "GPU 7", None),
        (["slurm.sh"], SLURM | {"ROLLOUT_GPUS": "2,2", "JUDGE_URL": AWAY}, {}, "GPU 2", "srun"),
        (["one_node.sh", "judge"], {"JUDGE_CONTEXT": "64k"}, {}, "JUDGE_CONTEXT=64k is no whole number", None),
        (DATA, {"RECIPE": "mine.yaml"}, {}, "there is no recipe mine.yaml", None),
        (["one_node.sh", "--dataset_name=base.yaml"], BELOW, {}, "] paths count from .* base.yaml is a file", None),
        (["one_node.sh"], {"ROLLOUT_SERVER": "sglang"}, {}, "ROLLOUT_SERVER is sglang: set it to vllm or trl", None),
        (["one_node.sh"], {"ROLLOUT_GPUS": "5,6"}, {}, "ROLLOUT_GPUS=5,6: GPU 6 is that of the training or", None),
        *((["one_node.sh"], {"PORT": n}, {}, f"PORT={n} leaves no port for the judge", None) for n in ("0", "65535")),
        (["one_node.sh", "train"], {}, {}, "train is no role: say judge, data or estimate", None),
        *(
            (["one_node.sh", f"--judge{dash}url=x"], {}, {}, "set JUDGE_URL=... and JUDGE_MODEL=... instead of", None)
            for dash in "_-"  # the parser of the training takes both
        ),
        (["one_node.sh", "--model_name_or_path", "x"], {}, {}, "set POLICY=... instead of --model_name_or_path", None),
        (["one_node.sh", "judge"], {"JUDGE_URL": HERE}, SERVED, "names a judge already: unset it", None),
        (["one_node.sh", "data", "in"], {}, {}, "name two files", None),
        (["one_node.sh", "data", "in.jsonl", "out.jsonl"], {}, {}, "there is no file in.jsonl in /", None),
        (["one_node.sh", "data", "me/set", "out"], {}, {}, "out must end in .jsonl or .parquet", None),
        (["one_node.sh", "data", "me/x.jsonl", "me/x.jsonl"], {}, {}, "me/x.jsonl would be written over", None),
        (["one_node.sh", "estimate"], {"REFUSES": "1"}, {}, "", "python"),
        (DATA, {"REFUSES_OPTIONS": "1"}, {}, "", "python"),
        (["slurm.sh"], SLURM | {"ADDRESS": "127.0.1."}, {}, "SERVE_HOST=127.0.1.0 is a loopback address", "srun"),
        (["slurm.sh"], {}, {}, "this is a script for sbatch", None),
        (["slurm.sh", "--output_dir", "runs/mine"], SLURM, {}, "set OUTPUT=... instead of --output_dir", None),
        (["slurm.sh", "--output-dir=runs/mine"], SLURM, {}, "set OUTPUT=... instead of --output_dir", None),
        (["one_node.sh"], {"REFUSES": "1"}, {}, "", "python"),
        (["one_node.sh"], {}, {8001: JUDGE}, "something already listens at http://127.0.0.1:8001", "python"),
        (["one_node.sh", "judge"], {}, {8001: JUDGE}, "something already listens at http://127.0.0.1:8001", None),
        (DATA, {"JUDGE_URL": HERE}, SERVED | {8000: POLICY}, "already listens at http://127.0.0.1:8000", "python"),
        (["one_node.sh"], {"STOLEN": "8001"}, {}, "address already in use .* judge ended before it was ready", "vllm"),
        (["one_node.sh"], {"FAILS": "8000"}, {}, "out of memory, .* rollouts ended before it was ready", "vllm"),
        (TRAIN, HOSTS, {8000: "other", 8001: JUDGE}, "does not serve Qwen/Qwen3-8B, so it is not our rollouts", "hf"),
        (TRAIN, SOON, {8001: JUDGE}, "rollouts at http://10.0.0.2:8000 was not ready .* two_nodes.sh serve on", "hf"),
        (TRAIN, SOON, {}, "no judge answers at http://10.0.0.2:8001/v1: .* two_nodes.sh serve on", "hf"),
    ],
    ids=str,
)
def test_a_fault_is_named_and_ends_everything(tmp_path, words, environment, there, message, reaches):
    done = launch(tmp_path, *words, there=there, **environment)
    assert done.status == 1 and done.left == []
    assert all(part in done.output for part in message.split(" .* ")), done.output
    started = {call.name for call in done.calls}
    order = ["scontrol", "srun", "python", "hf", "vllm", "engine", "accelerate"]
    assert max(started, key=order.index, default=None) in (reaches, "engine" if reaches == "vllm" else reaches)


def test_help_is_the_comment_of_the_script_and_starts_nothing(tmp_path):
    done = launch(tmp_path, "one_node.sh", "--help")
    assert done.status == 0 and not done.calls
    assert done.output.startswith("One machine with eight GPUs") and "set -euo" not in done.output
