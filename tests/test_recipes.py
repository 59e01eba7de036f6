"""Run or parse all that a user types: the quickstart, commands and code of the pages, recipes, benchmarks."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from conftest import QUICKSTART, ROOT
from helpers.gpu_commands import RUNS, gpu_command
from helpers.http_server import served

FOLDERS = (".", "docs", "docs/*", "recipes", "recipes/*")
READMES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.md"))
RECIPES = ROOT / "recipes"
PAPER, BEYOND = (sorted((RECIPES / folder).glob("*.yaml")) for folder in ("paper", "beyond"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def commands(readme) -> list[str]:
    """Return the lines of all bash blocks of a page, with continued lines joined."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run(*command: object, **kwargs) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *(str(part) for part in command)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def judge_url():
    """The address of the embedded judge, served over HTTP."""
    from rankbuffer_trl.judge.serve import make_app

    with served(make_app()) as address:
        yield address + "/v1"


@pytest.mark.parametrize("name", RUNS)
def test_the_commands_of_make_test_gpu_are_accepted(name, monkeypatch, capsys):
    """No GPU is at hand, but the real parser reads the commands, and the batches of each fit."""
    from rankbuffer_trl.training import command
    from rankbuffer_trl.training.parser import RecipeParser

    monkeypatch.chdir(ROOT)
    parsed = RecipeParser().parse_args_and_config([*gpu_command(name, "policy", "out"), "--dry_run"])
    command.run(*parsed)
    said = capsys.readouterr().out
    assert "the run: 4 steps" in said and "checkpoints: 2, after steps 2, 4" in said
    assert ("rollouts: vLLM" in said) == ("--use_vllm" in RUNS[name])


@pytest.mark.slow
def test_the_quickstart_runs_to_its_end(tmp_path):
    import policy

    from rankbuffer_trl.data.queries import load_queries

    done = run("recipes/quickstart/run.py", "--output_dir", tmp_path, "--warm_start_steps", 15, "--max_steps", 6)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"].keys() == summary["after"].keys() == {"rubric score", "grade", "overlap", "real words"}
    assert summary["judge"]["calls"] > 6 * 96 and summary["judge"]["failures"] == 0
    assert summary["anchors_per_query"][0] > 4
    for figure in ("quality.png", "buffers.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    tile, chart, more = (page.index(part) for part in ("mean rubric score", "Quality of the rollouts", "All charts"))
    assert tile < chart < more and page.count("Quality of the rollouts</h3>") == 1
    assert "The query whose score rose most" in page
    first, last = (summary[name]["rubric score"] for name in ("before", "after"))
    assert f"{first:.0f} before training, {last:.0f} after." in " ".join(done.stdout.split())

    made = (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns
    policy.build_policy(tmp_path / "policy", load_queries(str(policy.DATA)), seed=0, steps=15)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns == made, "the policy was built twice"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (("--dataset_name", "missing.jsonl"), "the data set missing.jsonl does not exist"),
        (("--format_check", "thnik"), "format_check must be 'think', 'none' or a regular expression with a group"),
        (("--num_iterations", "2", "--max_steps", "3", "--save_strategy", "epoch"), "the run ends at step 3, inside"),
    ],
    ids=lambda part: part[0],
)
def test_a_fault_that_a_user_can_mend_ends_the_recipe_in_one_line(fault, line):
    command = ["recipes/train_rankbuffer.py", "--config", "recipes/quickstart/quickstart.yaml", "--dry_run", *fault]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"rankbuffer-train: {line}")


@pytest.mark.slow
def test_the_recipe_takes_a_judge_over_http_and_lora(tmp_path, tiny_policy, judge_url):
    from helpers.scripted import contents

    from rankbuffer_trl.training import command
    from rankbuffer_trl.training.parser import RecipeParser

    arguments = [
        *("--config", str(QUICKSTART / "quickstart.yaml"), "--model_name_or_path", tiny_policy),
        *("--dataset_name", str(QUICKSTART / "howto.jsonl"), "--output_dir", str(tmp_path), "--max_steps", "1"),
        *("--judge_url", judge_url, "--judge_model", "rubric-judge", "--use_peft", "--lora_r", "4"),
        *("--lora_target_modules", "q_proj", "v_proj", "--max_completion_length", "16"),
    ]
    command.run(*RecipeParser().parse_args_and_config(arguments))
    assert (tmp_path / "adapter_model.safetensors").is_file()
    table = contents(tmp_path)
    assert len(table["groups"]) == 12
    assert {row[6] for row in table["calls"]} == {"parsed"}


def test_the_readmes_library_example_runs(tmp_path, tiny_policy, judge_url, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for shown, real in {
        "runs/mine": str(tmp_path),
        "http://127.0.0.1:8001/v1": judge_url,
        "my-judge": "rubric-judge",
        "Qwen/Qwen3-0.6B": tiny_policy,
        "data/mine.jsonl": str(QUICKSTART / "howto.jsonl"),
    }.items():
        assert shown in code
        code = code.replace(shown, real)
    small = "use_cpu=True, bf16=False, max_steps=1, max_completion_length=16, report_to='none', "
    code = code.replace("judge_url=", small + "judge_url=")
    names = {}
    exec(code, names)
    assert names["trainer"].state.global_step == 1
    names["trainer"].close()


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_files_in_a_readmes_commands_exist(readme):
    for command in commands(readme):
        for word in shlex.split(command, comments=True):
            if re.fullmatch(r"[\w/.-]+\.(py|yaml|jsonl|md)", word) and not word.startswith(("runs/", "data/")):
                found = (ROOT / word).is_file() or (word.endswith(".yaml") and (RECIPES / word).is_file())
                assert found, f"{readme}: {word} does not exist"


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_the_flags_in_a_readme_exist(readme):
    from rankbuffer_trl.training.parser import RecipeParser

    for command in commands(readme):
        words = shlex.split(command, comments=True)
        names = ("train_rankbuffer.py", "rankbuffer-train", "rankbuffer_trl.training.command")
        start = next((i for i, word in enumerate(words) if word.endswith(names)), None)
        if start is None:
            continue
        arguments = words[start + 1 :]
        # One process stands in for the many: 2 x 80 = 160 rollouts a step.
        small = ["--use_cpu", "--bf16", "false", "--push_to_hub", "false"]
        small += ["--gradient_accumulation_steps", "80"] if "paper/" in command else []
        RecipeParser().parse_args_and_config([*arguments, *small])


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_its_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    processes = {"zero3_8gpu": 8, "zero3_4gpu": 4, "zero3_cpu2": 2, "single": 1}[path.stem]
    assert config.num_processes == processes
    if "zero3" in path.stem:
        assert config.deepspeed_config["zero_stage"] == 3
        assert config.deepspeed_config["gradient_accumulation_steps"] == "auto"


def test_the_papers_settings_stand_in_the_recipe():
    recipe = yaml.safe_load((ROOT / "recipes" / "base.yaml").read_text())
    paper = dict(
        num_generations=8,
        learning_rate=1e-6,
        max_prompt_length=4096,
        max_completion_length=4096,
        format_weight=0.2,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        num_train_epochs=4,
    )
    assert {key: recipe[key] for key in paper} == paper
    main = yaml.safe_load((ROOT / "recipes" / "paper" / "rankbuffer.yaml").read_text())
    assert main["method_args"] == {"k0": 4, "refine_at": 3, "prune_after": 3}
    assert recipe["per_device_train_batch_size"] * 8 * recipe["gradient_accumulation_steps"] == 20 * 8


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPER + BEYOND, ids=lambda path: path.stem)
def test_a_recipe_trains(tmp_path, tiny_policy, judge_url, path):
    from helpers.scripted import contents

    from rankbuffer_trl.training import command
    from rankbuffer_trl.training.parser import RecipeParser

    arguments = [
        *("--config", str(path), "--model_name_or_path", tiny_policy, "--output_dir", str(tmp_path)),
        *(
            "--dataset_name",
            str(QUICKSTART / "howto.jsonl"),
            "--judge_url",
            judge_url,
            "--judge_model",
            "rubric-judge",
        ),
        *("--use_cpu", "--bf16", "false", "--dtype", "float32", "--use_vllm", "false", "--push_to_hub", "false"),
        *("--gradient_checkpointing", "false", "--format_check", "none", "--max_completion_length", "12"),
        *("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--max_steps", "2"),
        *("--temperature", "1.0", "--learning_rate", "1e-3"),
    ]
    script_args, training_args, model_args = RecipeParser().parse_args_and_config(arguments)
    command.run(script_args, training_args, model_args)
    recipe = yaml.safe_load(path.read_text())
    assert training_args.method == recipe["method"]
    table = contents(tmp_path)
    assert len(table["groups"]) == 4
    assert {row[2] for row in table["calls"]} == {training_args.reward_method().name}
    assert {row[6] for row in table["calls"]} == {"parsed"}


def test_the_index_names_every_recipe_of_the_paper():
    index = (ROOT / "recipes" / "README.md").read_text()
    assert len(PAPER) == 23
    assert [path.name for path in PAPER if f"`paper/{path.name}`" not in index] == []


def test_our_own_recipes_stand_apart_and_say_so():
    from rankbuffer_trl.training.config import RankBufferConfig

    index = (ROOT / "recipes" / "README.md").read_text()
    for path in BEYOND:
        assert f"`beyond/{path.name}`" in index
        assert re.search(r"^# .*\bThis method is ours\b", path.read_text())
        assert yaml.safe_load(path.read_text())["base"] == "base.yaml"
    ours = {yaml.safe_load(path.read_text())["method"] for path in BEYOND}
    papers = {yaml.safe_load(path.read_text())["method"] for path in PAPER}
    assert not ours & papers
    assert RankBufferConfig("runs", use_cpu=True, bf16=False).method in papers, "ours are off by default"


@pytest.mark.slow
def test_the_benchmarks_run_and_end_with_one_json_line(tmp_path):
    overhead = run("benchmarks/trainer_overhead.py", "--queries", 2, "--tokens", 4, "--steps", 2, "--turns", 1)
    assert json.loads(overhead.stdout.splitlines()[-1])["ratio"] > 0
    judge = run("benchmarks/judge_throughput.py", "--latency", 0.05, "--turns", 1)
    assert json.loads(judge.stdout.splitlines()[-1]).keys() >= {"ratio", "cpu_ms_per_call", "computed_prompt_share"}
    cost = run("benchmarks/judge_cost.py", "--queries", 2, "--acuity_queries", 1)
    assert json.loads(cost.stdout.splitlines()[-1]).keys() >= {"token_ratio", "call_ratio", "tau_ratio", "goals"}
    small = ("--rows", 30, "--estimate_only", "--queries", 8, "--latency", 0.05, "--turns", 1)
    data = run("benchmarks/prepare_data.py", *small)
    assert json.loads(data.stdout.splitlines()[-1]).keys() >= {"seconds", "memory_mb", "saturation"}
    store = run("benchmarks/buffer_store.py", "--queries", 20, 40, "--visits", 5, "--saves", 2)
    last = json.loads(store.stdout.splitlines()[-1])
    assert last["ratio"] > 0 and last["checkpoint_ratio"] > 0 and "memory_mb" in last
    page, figure = tmp_path / "overlap.md", tmp_path / "overlap.png"
    page.write_text("<!-- tables: begin --><!-- tables: end -->")
    overlap = run("benchmarks/overlap.py", "--queries", 2, "--scale", 0.02, "--ratios", 0.5, "--page", page)
    assert json.loads(overlap.stdout.splitlines()[-1])["same"] is True
    assert page.read_text().count("same results") == 2
    model = run("benchmarks/overlap_model.py", "--steps", 2, "--figure", figure)
    assert json.loads(model.stdout.splitlines()[-1]).keys() >= {"steps", "2 % truncated", "11 % truncated"}
    assert figure.stat().st_size > 0
