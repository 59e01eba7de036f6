"""Recipes, the quickstart, benchmarks and launch settings: what a user runs is parsed, or run in small."""

import json
import re
from contextlib import closing
from importlib import import_module

import pytest
import yaml
from conftest import QUICKSTART, ROOT, run_program
from helpers.gpu_commands import RUNS, gpu_command
from helpers.scripted import contents
from helpers.servers import served
from helpers.visits import visit_all

from rankbuffer_tools.batch.recipes import read_recipe
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_tools.train import command
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.data._queries import load_queries
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training._config import RankBufferConfig

RECIPES = ROOT / "recipes"
PAPER, BEYOND = (sorted((RECIPES / folder).glob("*.yaml")) for folder in ("paper", "beyond"))
ALL = sorted(RECIPES.rglob("*.yaml"))


def measured(path: str, *words: object) -> dict:
    """Run a benchmark, and return the JSON object of its last line."""
    return json.loads(run_program(ROOT / path, *words, timeout=300).splitlines()[-1])


@pytest.fixture(scope="module")
def judge_url():
    """The address of the embedded judge, served over HTTP."""
    with served(make_app()) as address:
        yield address + "/v1"


# What is written in a recipe


def test_every_recipe_parses_and_means_what_it_says(monkeypatch):
    """On the number of processes of the accelerate configuration that its header names."""
    for path in ALL:
        recipe, whole = yaml.safe_load(path.read_text()), read_recipe(path)
        text = path.read_text() + ((RECIPES / recipe["base"]).read_text() if "base" in recipe else "")
        launch = re.search(r"--config_file (accelerate_configs/\S+)", text)
        processes = yaml.safe_load((ROOT / launch[1]).read_text())["num_processes"] if launch else 1
        monkeypatch.setattr(RankBufferConfig, "world_size", processes)
        words = ["--config", str(path), *([] if whole.get("use_cpu") else ["--bf16", "false", "--use_cpu", "true"])]
        script, training, model = RecipeParser().parse_args_and_config(words)
        assert script.dataset_name and model.model_name_or_path, path
        for key, value in recipe.items():
            if key in ("base", "bf16", "use_cpu", "report_to"):  # set aside above; the last becomes a list
                continue
            (found,) = [getattr(part, key) for part in (script, training, model) if hasattr(part, key)]
            value = [value] if key == "judge_url" and isinstance(value, str) else value  # one or several
            assert str(getattr(found, "value", found)) == str(value), f"{path}: {key}"
        more = ["--method_args", "{}", "--dataset_name", "other.jsonl", "--judge_concurrency", "5"]
        script, training, _ = RecipeParser().parse_args_and_config([*words, *more])
        assert (script.dataset_name, training.method_args, training.judge_concurrency) == ("other.jsonl", {}, 5), path


def test_the_papers_settings_stand_in_the_recipe():
    recipe = read_recipe(RECIPES / "paper" / "rankbuffer.yaml")
    paper = dict(num_generations=8, learning_rate=1e-6, max_prompt_length=4096, max_completion_length=4096)
    paper |= dict(format_weight=0.2, temperature=0.6, top_p=0.95, top_k=20, num_train_epochs=4)
    paper |= dict(vllm_importance_sampling_correction=False)  # the paper's objective has no such factor
    paper |= dict(method="rankbuffer", method_args={"k0": 4, "refine_at": 3, "prune_after": 3})
    assert {key: recipe[key] for key in paper} == paper
    assert recipe["per_device_train_batch_size"] * 8 * recipe["gradient_accumulation_steps"] == 20 * 8


def test_methods_of_our_own_stand_apart_and_are_off_by_default():
    ours, papers = ({yaml.safe_load(path.read_text())["method"] for path in paths} for paths in (BEYOND, PAPER))
    assert len(PAPER) == 23 and ours and not ours & papers
    assert RankBufferConfig("runs", use_cpu=True, bf16=False).method in papers


@pytest.mark.parametrize("path", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.name)
def test_accelerate_reads_its_configs(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == {"zero3_8gpu": 8, "zero3_4gpu": 4, "zero3_cpu2": 2, "single": 1}[path.stem]
    if "zero3" in path.stem:
        assert config.deepspeed_config["zero_stage"] == 3
        assert config.deepspeed_config["gradient_accumulation_steps"] == "auto"


def test_the_commands_of_make_test_gpu_are_accepted(monkeypatch, capsys):
    """No GPU is at hand, but the real parser reads the commands, and the batches of each fit."""
    monkeypatch.chdir(ROOT)
    for name, words in RUNS.items():
        command.run(*RecipeParser().parse_args_and_config([*gpu_command(name, "policy", "out"), "--dry_run"]))
        said = capsys.readouterr().out
        assert "the run: 4 steps" in said and "checkpoints: save_steps 2," in said, name
        assert ("rollouts: vLLM" in said) == ("--use_vllm" in words), name


# Runs


def test_the_quickstart_counts_each_step_to_its_epoch(tmp_path):
    with closing(BufferStore(tmp_path / "s.sqlite")) as store:
        for step, id in enumerate("aba"):  # the second epoch is not complete
            visit_all(store, id, range(step, step + 1))
        curve = [{"step": step, "quality": quality} for step, quality in enumerate((1.0, 3.0, 9.0))]
        table = import_module("run").epoch_table(store, curve)
    assert list(table.columns[1].cells) == ["2.0", "9.0", ""]


@pytest.mark.slow
def test_the_program_without_a_word_runs_the_quickstart_to_its_end(tmp_path):
    import policy

    script = tmp_path / "train.py"  # as from a wheel: nothing of a checkout is beside it
    words = ("--output_dir", str(tmp_path), "--warm_start_steps", "15", "--max_steps", "6")
    script.write_text(
        "from rankbuffer_tools.train import command\n"
        f"command.quickstart = lambda whole=command.quickstart: whole(*{words})\ncommand.main([])\n"
    )
    said = run_program(script, timeout=300)
    first, last = said.strip().splitlines()[0], said.strip().splitlines()[-1]
    assert "supervised fine-tuning on the CPU, 15 steps" in said
    assert "no recipe is named" in first and f"launch {script} --config beyond/listwise_two.yaml" in last
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["before"].keys() == summary["after"].keys() == {"rubric score", "grade", "overlap", "real words"}
    assert summary["judge"]["calls"] > 6 * 96 and summary["judge"]["failures"] == 0
    assert summary["anchors_per_query"][0] > 4
    for figure in ("quality.png", "buffers.png"):
        assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    tile, chart, more = (page.index(part) for part in ("mean rubric score", "Quality of the rollouts", "All charts"))
    assert tile < chart < more and page.count("Quality of the rollouts</h3>") == 1
    assert "The query whose rise of the score is the largest." in page
    first, last = (summary[name]["rubric score"] for name in ("before", "after"))
    assert f"{first:.0f} before training, {last:.0f} after." in " ".join(said.split())

    made = (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns
    policy.build_policy(tmp_path / "policy", load_queries(str(policy.DATA)), seed=0, steps=15)
    assert (tmp_path / "policy" / "model.safetensors").stat().st_mtime_ns == made, "the policy was built twice"


LORA = ("--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj")


@pytest.mark.slow
@pytest.mark.parametrize("path", PAPER + BEYOND, ids=lambda path: path.stem)
def test_a_recipe_trains(tmp_path, tiny_policy, judge_url, path):
    arguments = [
        *("--config", str(path), "--model_name_or_path", tiny_policy, "--output_dir", str(tmp_path)),
        *("--dataset_name", str(QUICKSTART / "howto.jsonl"), "--judge_url", judge_url),
        *("--judge_model", "rubric-judge", "--push_to_hub", "false"),
        *("--use_cpu", "--bf16", "false", "--dtype", "float32", "--use_vllm", "false"),
        *("--gradient_checkpointing", "false", "--format_check", "none", "--max_completion_length", "12"),
        *("--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1", "--max_steps", "2"),
        *("--temperature", "1.0", "--learning_rate", "1e-3", *(LORA if path.stem == "rankbuffer" else ())),
    ]
    settings = RecipeParser().parse_args_and_config(arguments)
    command.run(*settings)
    assert (tmp_path / "adapter_model.safetensors").is_file() == (path.stem == "rankbuffer")
    assert settings[1].method == yaml.safe_load(path.read_text())["method"]
    table = contents(tmp_path)
    assert len(table["groups"]) == 2 * 16 // settings[1].num_generations
    assert {row[2] for row in table["calls"]} == {settings[1].reward_method().name}
    assert {row[6] for row in table["calls"]} == {"parsed"}


@pytest.mark.slow
def test_the_benchmarks_run_and_end_with_one_json_line():
    overhead = measured("benchmarks/trainer_overhead.py", "--queries", 2, "--tokens", 4, "--steps", 2, "--turns", 1)
    assert overhead["ratio"] > 0
    judge = measured("benchmarks/judge_throughput.py", "--latency", 0.05, "--turns", 1)
    assert judge.keys() >= {"ratio", "cpu_ms_per_call", "computed_prompt_share"}
    store = measured("benchmarks/buffer_store.py", "--queries", 20, 40, "--visits", 5, "--saves", 2)
    assert store["ratio"] > 0 and store["checkpoint_ratio"] > 0 and "memory_mb" in store
    page = measured("benchmarks/report_size.py", "--steps", 1, 2, "--queries", 20, "--response_bytes", 50)
    assert page["memory_ratio"] > 0 and page["steps"] == [1, 2]
    lists = measured("benchmarks/overlap.py", "--queries", 2, "--rollouts", 16, "--block", 8)
    assert lists["lists of 8"]["visible"] < lists["lists of 16"]["visible"]
    overlap = measured("benchmarks/overlap.py", "--queries", 2, "--scale", 0.02, "--measure")
    assert overlap["same"] is True and overlap["model"].keys() == overlap["measured"].keys()
