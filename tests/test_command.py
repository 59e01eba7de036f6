"""The command `rankbuffer-train`: recipes and their bases, the help, a resume, the last lines, errors of one line."""

import importlib.machinery
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import types
from dataclasses import fields
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from conftest import QUICKSTART, ROOT
from datasets.exceptions import DefunctDatasetError
from helpers.scripted import config
from httpx import ConnectError
from pyarrow import ArrowNotImplementedError
from safetensors import SafetensorError
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from rankbuffer_tools.batch.output import write_rows
from rankbuffer_tools.batch.recipes import find_recipe, overlay, read_recipe, take_option
from rankbuffer_tools.paper import RECIPE_FOLDER
from rankbuffer_tools.train import command
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.checkpointing import _checkpoint as checkpoint
from rankbuffer_trl.checkpointing._distributed import MainProcessError
from rankbuffer_trl.checkpointing.manifest import CheckpointError
from rankbuffer_trl.data._queries import DataError, load_queries
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import JudgeError, Totals
from rankbuffer_trl.store import StoreError
from rankbuffer_trl.training._config import CHOICES, LOSSES, RankBufferConfig

CPU = ("--use_cpu", "--bf16", "false")
HOWTO = str(QUICKSTART / "howto.jsonl")
PAPER = ("--config", "paper/rankbuffer.yaml", "--dataset_name", HOWTO, "--num_processes", "8")


def parse(*words: str):
    return RecipeParser().parse_args_and_config([*CPU, *words])


def fault_of(work) -> Exception:
    """Return the error that `work` raises."""
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


# Recipes


def test_find_recipe_looks_here_first_and_then_in_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ("paper/dapo.yaml", "recipes/paper/dapo.yaml")
    assert [find_recipe(name) for name in names] == [RECIPE_FOLDER / "paper" / "dapo.yaml"] * 2
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "dapo.yaml").write_text("seed: 7")
    assert [find_recipe(name).samefile("paper/dapo.yaml") for name in names] == [True, False]


def test_read_recipe_reads_older_names_of_settings(tmp_path):
    (tmp_path / "base.yaml").write_text("reader: {judge_model: better}\n")
    (path := tmp_path / "mine.yaml").write_text("base: base.yaml\nreader_first: 3\n")
    assert read_recipe(path) == {"reference_judge": {"judge_model": "better"}, "reference_groups": 3}
    path.write_text("reference_groups: 2\nreader_first: 3\n")
    with pytest.raises(SettingsError, match="both are set: leave reader_first out"):
        read_recipe(path)
    with pytest.raises(SettingsError, match=r"no key .reader_first. .did you mean reference_groups"):
        RecipeParser().parse_args_and_config(["--reader_first", "3"])


def test_read_recipe_takes_the_base_beside_it_first(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: base.yaml\nseed: 7\n")
    packaged = yaml.safe_load((RECIPE_FOLDER / "base.yaml").read_text())
    assert read_recipe(tmp_path / "mine.yaml") == packaged | {"seed": 7}
    (tmp_path / "base.yaml").write_text("seed: 8\nbeta: 0.5\n")
    assert read_recipe(tmp_path / "mine.yaml") == {"seed": 7, "beta": 0.5}
    (tmp_path / "base.yaml").write_text("base: base.yaml\nbeta: 0.5\n")  # not itself, but that of the package
    found = read_recipe(tmp_path / "mine.yaml")
    assert (found["beta"], found["num_generations"]) == (0.5, 8)
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: a.yaml")
    with pytest.raises(SettingsError, match=r"there is no other recipe 'a.yaml' in .*paper/rankbuffer.yaml"):
        read_recipe(tmp_path / "a.yaml")
    for text in ("- 1", "seed: [", "\xff", "1: x", "output_dir: {{OUT}}"):
        (tmp_path / "bad.yaml").write_bytes(text.encode("latin-1"))
        with pytest.raises(SettingsError, match=r"^the recipe .*bad\.yaml.*$"):
            parse("--config", str(tmp_path / "bad.yaml"))


def test_overlay_keeps_the_arguments_of_a_method_from_another_one(tmp_path):
    two, three = {"k0": 2}, {"k0": 3}
    for below, above, arguments in (
        ({"method": "rankbuffer", "method_args": two}, {"method": "rrc_agr"}, None),
        ({"method_args": two}, {"method": "rrc_agr"}, None),
        ({"method_args": two}, {"method": "rankbuffer"}, two),
        ({"method": "rankbuffer", "method_args": two}, {"seed": 1}, two),
        ({"method": "rankbuffer", "method_args": two}, {"method": "rankbuffer"}, two),
        ({"method": "rrc_agr"}, {"method": "rankbuffer", "method_args": three}, three),
        ({"method": "rankbuffer", "method_args": two}, {"method_args": three}, three),
    ):
        assert overlay(below, above).get("method_args") == arguments, (below, above)
        (tmp_path / "below.yaml").write_text(yaml.safe_dump(below))
        (tmp_path / "above.yaml").write_text(yaml.safe_dump({"base": "below.yaml", **above}))
        assert read_recipe(tmp_path / "above.yaml").get("method_args") == arguments, (below, above)
        words = ["--config", str(tmp_path / "below.yaml"), "--output_dir", "out"]
        for key, value in above.items():
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
        assert parse(*words)[1].method_args == arguments, (below, above)


def test_parser_sets_the_environment_of_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("RANKBUFFER_TEST", "before")
    (tmp_path / "a.yaml").write_text("env: {RANKBUFFER_TEST: 1}\noutput_dir: out\n")
    parse(f"--config={tmp_path / 'a.yaml'}")
    assert os.environ["RANKBUFFER_TEST"] == "1"
    (tmp_path / "a.yaml").write_text("env: RANKBUFFER_TEST=1\noutput_dir: out\n")
    with pytest.raises(SettingsError, match="env must be a mapping"):
        parse(f"--config={tmp_path / 'a.yaml'}")
    for key in ("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE"):
        (tmp_path / "a.yaml").write_text(f"env: {{{key}: other, RANKBUFFER_TEST: 2}}\noutput_dir: out\n")
        with pytest.raises(SettingsError, match=f"env has {key}, .*: export it"):
            parse(f"--config={tmp_path / 'a.yaml'}")
        assert os.environ["RANKBUFFER_TEST"] == "1"
        with monkeypatch.context() as patch:
            patch.setenv(key, "other")
            parse(f"--config={tmp_path / 'a.yaml'}")
        os.environ["RANKBUFFER_TEST"] = "1"


@pytest.mark.parametrize("name", ["2026", "2026-11-26", "1.5"])
def test_parser_takes_a_number_or_a_date_for_a_text_as_the_command_line_does(name, tmp_path, monkeypatch):
    monkeypatch.setenv("1", "")
    (tmp_path / "a.yaml").write_text(f"output_dir: {name}\nenv: {{1: 2}}\nseed: 2\n")
    found = parse(f"--config={tmp_path / 'a.yaml'}")[1]
    assert (found.output_dir, found.seed, os.environ["1"]) == (name, 2, "2")


# Typos


def test_parser_names_a_typo_in_one_line_with_what_there_is(monkeypatch):
    here = Path.cwd()
    for words, message in (
        (["--prune_afetr", "3"], "there is no key 'prune_afetr'"),
        (["--judge_modle", "x"], "there is no key 'judge_modle' (did you mean judge_model"),
        (["--judge_modle=x"], "there is no key 'judge_modle' (did you mean judge_model"),
        (["--seed", "one"], "argument --seed: invalid int value: 'one'"),
        (["--config"], "there is no recipe ''"),
        (["--config", "grop.yaml"], f"there is no recipe 'grop.yaml' in {here} (did you mean paper/grpo.yaml"),
        (["--config", "zzz.yaml"], f"there is no recipe 'zzz.yaml' in {here}; the recipes of this package are"),
        (["--method", "a.B"], "there is no reward method 'a.B' (No module named 'a'): set `method` to one of aren"),
        (["--loss_type", "dappo"], "there is no loss 'dappo': set loss_type to one of grpo, bnpo, dr_grpo, dapo,"),
        (["--vllm_mode", "serve"], "there is no vllm_mode 'serve': set vllm_mode to one of server, colocate"),
        (["--scale_rewards", "batches"], "there is no scale_rewards 'batches': set scale_rewards to one of group,"),
        (["--load_best_model_at_end", "true"], "--load_best_model_at_end requires the save and eval strategy"),
        (
            ["--report_to", "tensorbord"],
            "report_to: there is no backend 'tensorbord' (did you mean tensorboard?",
        ),
    ):
        found = fault_of(partial(parse, "--output_dir", "out", *words))
        assert isinstance(found, SettingsError) and str(found).startswith(message) and "\n" not in str(found), found
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # a typo is named before what the machine lacks
    with pytest.raises(SettingsError, match=r"there is no reward method .rankbufer. .did you mean rankbuffer or"):
        RecipeParser().parse_args_and_config(["--output_dir", "out", "--bf16", "true", "--method", "rankbufer"])


def test_recipe_with_a_key_twice_or_too_deep_is_refused(tmp_path):
    for text in ("seed: 1\nbf16: false\nseed: 2\n", "method_args: {k0: 2, k0: 3}\n"):
        (tmp_path / "a.yaml").write_text(text)
        with pytest.raises(SettingsError, match=r"a\.yaml cannot be read: .* stands twice"):
            read_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("a:\n " + "- " * 3000)
    with pytest.raises(SettingsError, match=r"a\.yaml cannot be read: maximum recursion"):
        read_recipe(tmp_path / "a.yaml")
    (tmp_path / "a.yaml").write_text("a: &a {seed: 1}\nb: {<<: *a, seed: 2}\n")
    assert read_recipe(tmp_path / "a.yaml")["b"] == {"seed": 2}, "a merged key is no repetition"


def test_choices_are_those_of_trl():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    used = re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|\"\w+\")", source)
    assert {name for text in used for name in re.findall(r'"(\w+)"', text)} == set(LOSSES)
    trainer = inspect.getsource(inspect.getmodule(GRPOTrainer)) + inspect.getsource(VLLMGeneration)
    for key, names in CHOICES.items():
        assert all(f'"{name}"' in trainer for name in names if isinstance(name, str)), key


def test_check_backends_refuses_what_is_not_installed(monkeypatch):
    path = "rankbuffer_trl.training._config.get_available_reporting_integrations"
    monkeypatch.setattr(path, lambda: ["tensorboard"])
    for name, words in (
        ("trackio", r"trackio is not installed: pip install 'rankbuffer-trl\[trackio\]'"),
        ("wandb", r"wandb is not installed: pip install 'rankbuffer-trl\[wandb\]'"),
        ("mlflow", "the library of mlflow is not installed"),
    ):
        with pytest.raises(SettingsError, match=f"report_to: {words}"):
            RankBufferConfig("out", dry_run=True, report_to=name)
    for name, found in (("tensorboard", ["tensorboard"]), ("none", []), ("flyte", ["flyte"])):
        assert RankBufferConfig("out", dry_run=True, report_to=name).report_to == found


def test_given_takes_an_option_out_of_the_command_line():
    words = ["--seed", "-1", "--config", "a.yaml", "--lr=2", "--config=b.yaml", "--configs", "x"]
    assert take_option(words, "config") == ("b.yaml", ["--seed", "-1", "--lr=2", "--configs", "x"])
    assert take_option(["--method-args", '{"k0": -1}'], "method_args") == ('{"k0": -1}', [])
    assert take_option(["--seed", "1", "--config"], "config") == ("", ["--seed", "1"])
    assert take_option(words, "method") == (None, words)


def test_help_begins_with_our_keys_and_shows_all_on_request(capsys):
    pages = []
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit) as left:
            RecipeParser().parse_args_and_config([word])
        assert left.value.code == 0
        pages.append(capsys.readouterr().out)
    short, whole = (re.findall(r"^  (?:-h, )?--(\w+)", page, re.MULTILINE) for page in pages)
    assert short[0] == "method" and short.index("judge_url") < short.index("dataset_name")
    every = {field.name for field in fields(RankBufferConfig)}
    assert {name for name in every if name.startswith("judge_")} < set(short)
    assert "adam_beta1" in whole and "adam_beta1" not in short
    assert len(pages[0].splitlines()) < 300 and "--judge-url" not in pages[0]
    assert "--no_" not in pages[0], "it would stand beside the help of the opposite"
    assert "Weight of the format reward (0 or 1). (default: 0.2)" in " ".join(pages[0].split())


# What a new reader types first


def test_a_launch_for_several_processes_without_a_recipe_says_which_one_to_name(capsys, monkeypatch):
    for words, name, value in (
        ([], "WORLD_SIZE", "8"),
        ([], "ACCELERATE_USE_DEEPSPEED", "true"),
        (["--dry_run", "--output_dir", "out"], "WORLD_SIZE", "1"),
    ):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
        monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            command.main(words)
        assert "no recipe is named" in left.value.code and "\n" not in left.value.code, words
        shown = re.search(r"accelerate launch (--config_file \S+) (\S+) --config (\S+)$", left.value.code)
        assert all((ROOT / path.split()[-1]).is_file() for path in shown.groups())
    assert not capsys.readouterr().out


def test_a_dry_run_without_the_data_set_prints_the_plan_and_how_to_make_the_set(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> tuple[str, str]:
        with pytest.raises(SystemExit) as left:
            command.main([*words, "--num_processes", "8"])
        return capsys.readouterr().out, left.value.code

    for name in ("rankbuffer", "rankbuffer_bootstrap", "pairwise_rank"):
        plan, line = said("--config", f"paper/{name}.yaml", "--dry_run")
        assert "[dry run] data: 1,000 queries, 50 steps an epoch\n[dry run] the run: 200 steps, 4 epochs" in plan
        assert plan.startswith("[dry run] the data set data/nectar_1000.jsonl does not exist: this is the")
        missing = "^rankbuffer-train: the data set data/nectar_1000.jsonl does not exist.*prepare_nectar.py"
        assert re.search(missing, line) and "generate_rubrics.py" in line and "\n" not in line
    plan, line = said("--config", "paper/rankbuffer.yaml", "--preflight_only")
    assert plan == "" and "prepare_nectar.py" in line, "only a dry run plans for what is not there"
    plan, line = said("--dry_run", "--dataset_name", "mine.jsonl", "--output_dir", "out")
    assert plan == "" and "docs/data.md says how to make one" in line and "nectar" not in line


# What a run needs beside the judge


def test_push_line_says_what_is_pushed_where_and_a_push_is_private_unless_told(tmp_path, monkeypatch, capsys):
    def hub(*more: str) -> str:
        command.run(*parse(*PAPER, "--dry_run", "--output_dir", str(tmp_path / "ranked"), *more))
        return re.search(r"^\[dry run\] hub: (.*)$", capsys.readouterr().out, re.MULTILINE)[1]

    monkeypatch.setattr(command, "get_token", lambda: None)
    with pytest.raises(SettingsError, match="push_to_hub is set, but this machine has no login for the Hub"):
        hub("--push_to_hub")
    monkeypatch.setattr(command, "get_token", lambda: "hf_secret")
    here = "policy, buffers and card go to ranked of your account (private), every_save; a login is there"
    assert hub("--push_to_hub") == here
    other = hub("--push_to_hub", "--hub_model_id", "me/mine", "--hub_private_repo", "false")
    assert "go to me/mine (public: everybody can read it)" in other and "secret" not in other
    adapter = hub("--push_to_hub", "--use_peft", "--model_name_or_path", str(tmp_path))
    assert adapter == f"{here}; the adapter will name {tmp_path} as its base, which others do not have"
    assert hub("--push_to_hub", "--use_peft") == hub("--push_to_hub", "--model_name_or_path", str(tmp_path)) == here
    for words in (["--output_dir", "out"], *(["--config", str(path)] for path in RECIPE_FOLDER.rglob("*.yaml"))):
        words = (*words, "--dry_run", "--num_processes", "8")
        assert command.push_line(*parse(*words)[1:]).startswith("hub: nothing is pushed"), words
        given = parse(*words, "--push_to_hub")[1:]
        assert given[0].hub_private_repo is True and "(private)" in command.push_line(*given), words


def test_log_in_names_a_missing_login_before_anything_is_loaded(monkeypatch, capsys):
    """The stand-in does what the library does without a terminal. The library itself is an extra."""
    asked = []

    def login(**arguments):
        asked.append(arguments)
        if "WANDB_API_KEY" not in os.environ:
            raise wandb.Error("No API key configured.\nUse `wandb login` to log in.")
        return True

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.Error, wandb.run, wandb.login = type("Error", (Exception,), {}), None, login
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = [*PAPER, "--dry_run", *CPU]
    command.main(words)
    assert not asked
    with pytest.raises(SystemExit) as stop:
        command.main([*words, "--report_to", "wandb"])
    said = "rankbuffer-train: report_to: wandb cannot log in (No API key configured. Use `wandb login` to log in.):"
    assert stop.value.code.startswith(said) and "\n" not in stop.value.code
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    command.main([*words, "--report_to", "wandb"])
    assert asked == [{"verify": False}] * 2 and "[dry run]" in capsys.readouterr().out


def test_main_prints_a_letter_that_the_locale_has_not(tmp_path, rows, monkeypatch):
    write_rows(tmp_path / "q.jsonl", [row | {"prompt": f"\u65e5 {i}"} for i, row in enumerate(rows)])
    monkeypatch.setattr(sys, "stdout", out := TextIOWrapper(BytesIO(), "latin-1", write_through=True))
    words = ["--dataset_name", str(tmp_path / "q.jsonl"), "--output_dir", str(tmp_path / "run"), *CPU]
    command.main([*words, "--preflight_only"])
    assert rb"\u65e5 0" in out.buffer.getvalue()


# The budget


def test_over_budget_counts_all_attempts(tmp_path):
    prices = dict(judge_prompt_price=2.0, judge_completion_price=4.0, judge_price_budget=10.0)
    spent = Totals(spent_prompt_tokens=1_000_000, spent_completion_tokens=1_999_999)
    for budget, over in ((3_000_000, False), (2_999_999, True)):
        assert bool(config(tmp_path, judge_token_budget=budget).over_budget(spent)) == over
    assert config(tmp_path, **prices).over_budget(spent) is None
    more = spent + Totals(spent_completion_tokens=1)
    assert config(tmp_path, **prices).over_budget(more).startswith("the judge has cost 10.00")
    assert config(tmp_path).over_budget(spent) is None
    for cached, over in ((800_001, False), (800_000, True), (0, True)):  # at a quarter of the price
        with_cached = more + Totals(spent_prompt_tokens=600_000, spent_cached_tokens=cached)
        assert bool(config(tmp_path, **prices, judge_cached_price=0.5).over_budget(with_cached)) == over, cached


# Resume, and the end


@pytest.mark.slow
def test_run_resumes_where_it_says_and_reads_each_checkpoint_once(
    tmp_path, quickstart, data_file, capsys, monkeypatch
):
    words = ["--max_completion_length", "8", "--per_device_train_batch_size", "32", "--save_steps", "2"]
    quickstart(*words, "--max_steps", "2")
    first = capsys.readouterr().out
    assert "[preflight] the run: 8 groups of 8 rollouts" in first and "[resume]" not in first
    end = [line for line in first.splitlines() if line.startswith("[end]")]
    assert end[0].startswith(f"[end] policy: {tmp_path}, after step 2") and (tmp_path / "buffers.parquet").is_file()
    assert end[1] == f"[end] report: rankbuffer-report {tmp_path} --dataset_name {data_file}"
    assert f" after={tmp_path}" in end[2] and f"--models {tmp_path}" in end[3]
    quickstart(*words, "--max_steps", "1", "--method", "pointwise", "--output_dir", tmp_path / "other")
    assert ("buffers" in end[0], "buffers.parquet" in capsys.readouterr().out) == (True, False)
    resume = [*words, "--resume_from_checkpoint", "true"]
    # 12 queries: 4 first visits of 8 judgments are left, then 8 later ones of 8 to 12
    rest = "the rest of the run, from step 2: 12 groups of 8 rollouts, 96 to 144 judgments"
    for mode in ("preflight", "dry run"):
        quickstart(*resume, "--max_steps", "5", "--preflight_only" if mode == "preflight" else "--dry_run")
        second = capsys.readouterr().out
        assert f"[resume] from {tmp_path}/checkpoint-2, after step 2 of 5: 3 steps are left" in second
        assert f"[{mode}] {rest}" in second and f"[{mode}] the run: 5 steps" in second
    quickstart(*resume, "--max_steps", "3", "--dry_run", "--learning_rate", "0.5")
    said = capsys.readouterr().out
    assert "1 step is left\n[resume] learning_rate stays 0.0002, and 0.5 has no effect" in said
    read, fingerprint = [], checkpoint.fingerprint
    monkeypatch.setattr(checkpoint, "fingerprint", lambda path: read.append(path) or fingerprint(path))
    quickstart(*resume, "--max_steps", "3")
    read = [path for path in read if path.parent.name == "checkpoint-2"]
    assert read and len(read) == len(set(read)), "each file of the checkpoint is read once"
    capsys.readouterr()
    monkeypatch.setattr("rankbuffer_trl.judge._rubric_judge.RubricJudge.answer", None)
    quickstart(*resume, "--max_steps", "3")
    last = capsys.readouterr().out
    assert "after step 3 of 3: 0 steps are left" in last and "[preflight]" not in last, "the judge is not asked again"
    for changes, told in (
        (("--seed", "9"), "seed .* 9 now"),
        (("--method", "listwise"), "method .*'listwise' now"),
        (("--optim", "adafactor"), "optim: .* 'adafactor' now"),
    ):
        with pytest.raises(CheckpointError, match=f"belongs to another run:\n  {told}"):  # and asks nothing before
            quickstart(*resume, "--max_steps", "5", *changes)
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    for start, message in (
        ("true", "no whole checkpoint in"),
        (str(tmp_path / "checkpoint-2"), "is not a whole"),
        ("ture", "no folder ture: .* has checkpoint-3, checkpoint-2, and"),
    ):
        with pytest.raises(CheckpointError, match=message):
            quickstart(*words, "--max_steps", "5", "--resume_from_checkpoint", start)


def test_a_warning_of_a_training_begins_its_own_line(tmp_path, quickstart, capsys, monkeypatch):
    class Warns(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            logging.getLogger("rankbuffer_trl").warning("the judge is down")

    def build(*arguments):
        (trainer := build_trainer(*arguments)).add_callback(Warns())
        return trainer

    build_trainer = command.build_trainer
    monkeypatch.setattr(command, "build_trainer", build)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    quickstart("--max_steps", "1", "--max_completion_length", "8", "--save_strategy", "no")
    err = capsys.readouterr().err
    assert "%|" in err and re.search(r"[\r\n]the judge is down\n", err)


# Errors


def test_leave_says_once_a_machine_what_all_processes_find(tmp_path, monkeypatch):
    for error, rank, status in (
        (SettingsError("wrong"), "0", "rankbuffer-train: wrong"),
        (SettingsError("wrong"), "3", 1),
        (DataError("wrong"), "3", 1),
        (JudgeError("wrong"), "0", 75),  # a resume may mend it
        (StoreError("wrong"), "3", "rankbuffer-train: wrong"),  # a disk can be full for one process alone
        (MainProcessError("the main process failed"), "0", "rankbuffer-train: the main process failed"),
        (MainProcessError("the main process failed"), "3", 1),
    ):
        monkeypatch.setattr(command, "run", Mock(side_effect=error))
        monkeypatch.setattr(command, "LOCAL_RANK", int(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{type(error).__name__}{rank}.json"))
        with pytest.raises(SystemExit) as left:
            command.main(["--output_dir", "out", *CPU])
        assert left.value.code == status, (error, rank)
        if not isinstance(error, MainProcessError):
            written = json.loads((tmp_path / f"{type(error).__name__}{rank}.json").read_text())
            assert written["message"] == "rankbuffer-train: wrong"
    monkeypatch.setattr(command, "run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(["--output_dir", "out", *CPU])


def test_save_checkpoint_names_what_cannot_be_written_and_a_bug_keeps_its_traceback(tmp_path, training, monkeypatch):
    weights = {"a": torch.zeros(10**6)}
    unwritable = [
        OSError(28, "No space left on device"),
        SafetensorError("Error while serializing: I/O error"),
        StoreError("cannot save the buffer store"),
        *(fault_of(partial(torch.save, weights, path)) for path in ("/dev/full", "/nowhere/x", "/proc/x")),
        fault_of(partial(torch.save, {"a": torch.zeros(10)}, "/dev/full")),
        fault_of(partial(torch.save, weights, "/dev/full", _use_new_zipfile_serialization=False)),
    ]
    trainer = training()
    bugs = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("NCCL error"), IndexError("a bug")]
    for error in [*unwritable, *bugs]:
        monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", Mock(side_effect=error))
        found = fault_of(partial(trainer._save_checkpoint, trainer.model, None))
        assert (found is error) == (error in bugs), error
        told = f"checkpoint-0 could not be written to {re.escape(str(tmp_path))}: .*disk of that folder has .* MB"
        advice = "start the run as before, since no checkpoint was written before it"
        assert error in bugs or (type(found) is CheckpointError and re.search(f"{told}.*{advice}", str(found))), found
    (tmp_path / "checkpoint-0").mkdir()  # the one that could not be written
    for before, advice in ((0, "start the run as before"), (1, "set resume_from_checkpoint to true")):
        (tmp_path / f"checkpoint-{before}").mkdir(exist_ok=True)
        monkeypatch.setattr(GRPOTrainer, "_save_checkpoint", Mock(side_effect=unwritable[0]))
        assert advice in str(fault_of(partial(trainer._save_checkpoint, trainer.model, None)))


def test_load_queries_names_what_cannot_be_read_and_a_bug_keeps_its_traceback(monkeypatch):
    unreadable = [ConnectionError("down"), ArrowNotImplementedError("codec"), ConnectError("down"), StopIteration()]
    unreadable += [DefunctDatasetError("gone"), RuntimeError("Dataset scripts are no longer supported")]
    bugs = [KeyError("a bug"), RuntimeError("a bug"), RecursionError("a bug")]
    for error in [*unreadable, *bugs]:
        monkeypatch.setattr("rankbuffer_trl.data._queries.load_dataset", Mock(side_effect=error))
        found = fault_of(partial(load_queries, "me/mine"))
        assert (found is error) == (error in bugs), error
        assert error in bugs or (type(found) is DataError and "data set me/mine cannot be read" in str(found))


def test_build_trainer_names_a_policy_that_does_not_exist(tmp_path, data_file):
    words = ["--dataset_name", str(data_file), "--output_dir", str(tmp_path), "--per_device_train_batch_size", "8"]
    unknown = "the trainer for nobody/nothing cannot be built: "
    for name, message in (("nobody/nothing", unknown), ("", "model_name_or_path is not set")):
        script, args, model = parse(*words, "--model_name_or_path", name)
        with pytest.raises(SettingsError, match=f"^{message}.*$"):
            command.build_trainer(script, model, command.make_plan(script, args))
    for more, message in (
        *(("--dataset_name=", "dataset_name is not set"), ("--dataset_streaming", "is not supp")),
        ("--judge_view=transcript", "this run has none"),
    ):
        with pytest.raises(SettingsError, match=message):
            command.make_plan(*parse(*words, more)[:2])


def test_check_template_refuses_a_policy_without_one_before_the_judge_is_asked(
    tmp_path, tiny_policy, data_file, monkeypatch
):
    from transformers import AutoTokenizer

    command.check_template(tiny_policy, None)
    unknown = "there is no folder nobody/nothing here, and the Hub"
    for name, message in ((None, "model_name_or_path is not set"), ("nobody/nothing", unknown)):
        with pytest.raises(SettingsError, match=message):
            command.check_template(name, None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.save_pretrained(tmp_path / "lora")
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"lora is an adapter, .*: merge it into its base"):
        command.check_template(str(tmp_path / "lora"), None)
    monkeypatch.setattr(command, "report", lambda plan: pytest.fail("the judge was asked"))
    words = ["--dataset_name", str(data_file), "--output_dir", str(tmp_path), "--per_device_train_batch_size", "8"]
    row = json.loads(data_file.read_text().splitlines()[0])
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "train.jsonl").write_text(data_file.read_text())
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    (tmp_path / "two" / "test.jsonl").write_text(json.dumps(row))
    words += ["--model_name_or_path", f"{tmp_path}/bare", "--chat_template_kwargs", '{"odd": 1}']
    two = ["--eval_strategy", "epoch", "--dataset_name", f"{tmp_path}/two"]
    users = "{% for each in messages if each.role == 'user' %}{{ each.content }}{% endfor %}"
    never = "{{ raise_exception('Never') if %s }}"
    unread = r"^row 1 of the data to evaluate on \(.*\): .* leaves out a message of the role 'system'"
    for template, more, message in (
        (None, [], r"^.*bare has no chat template.*$"),
        (never % "odd", [], r"^row 1 \(.*\): .* refuses a prompt of the roles user: Never"),
        (never % "messages[1:]" + "{{ messages[0].content }}", two, "refuses a prompt of the roles system, user"),
        *((users, [*two, *mode], unread) for mode in ([], ["--dry_run"], ["--preflight_only"])),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / "bare")
        with pytest.raises(RankBufferError, match=message):
            command.run(*parse(*words, *more))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_main_under_a_launcher_shows_one_line_of_ours_and_no_traceback_of_ours(tmp_path, tiny_policy, processes):
    """What accelerate and torch add is theirs; docs/faults.md shows it."""
    name = {1: "single", 2: "zero3_cpu2"}[processes]
    words = [
        *("-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{name}.yaml", "--quiet"),
        *("--main_process_port", "0", "recipes/train_rankbuffer.py", "--config", "quickstart/quickstart.yaml"),
        *("--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "x", "--output_dir", str(tmp_path / "run")),
        *("--model_name_or_path", str(tiny_policy)),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "rankbuffer-train: the judge server" in line]
    assert said[0].startswith("rankbuffer-train: ") and "cannot be reached, so nothing was started" in said[0]
    assert "rankbuffer_trl/" not in done.stderr
    if processes == 1:
        assert len(said) == 1 and "Traceback" not in done.stderr
    else:
        [first, cause] = said
        assert cause.strip() == f"traceback : {first}", "torch's launcher ends with the cause"
