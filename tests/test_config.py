"""The configuration: bad values are named before anything is loaded, good ones reach what they configure."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from train_rankbuffer import make_parser
from trl import GRPOConfig

from rankbuffer_trl.config import RankBufferConfig
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.rewards.rankbuffer import RankBuffer

RECIPES = sorted([*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("recipes/**/*.yml")])
STOCK = {field.name for field in fields(GRPOConfig)}
OWN = [field for field in fields(RankBufferConfig) if field.name not in STOCK]
SERVER = {"judge_url": "http://127.0.0.1:8001/v1", "judge_model": "judge"}


@pytest.fixture
def make(tmp_path):
    def make(**values) -> RankBufferConfig:
        base = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
        return RankBufferConfig(**(base | {"per_device_train_batch_size": 8, "num_generations": 8} | values))

    return make


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k0", 1),
        ("k0", -4),
        ("prune_after", 0),
        ("refine_at", 0),
        ("judge_max_tokens", 0),
        ("judge_max_retries", -1),
        ("judge_max_attempts", 0),
        ("judge_concurrency", 0),
        ("judge_max_failures", -0.1),
        ("judge_max_failures", 1.5),
        ("judge_timeout", 0.0),
        ("judge_timeout", -3.0),
        ("format_weight", -0.2),
        ("buffer_init", "nectar"),
        ("judge_url", "127.0.0.1:8001"),
        ("judge_url", "ftp://judge"),
        ("judge_model", "Qwen/Qwen3-32B"),
        ("format_check", "(?P<answer"),
        ("max_prompt_length", 0),
        ("max_prompt_length", -5),
    ],
)
def test_a_bad_value_is_refused_with_key_and_value(make, key, value):
    with pytest.raises(ValueError) as error:
        make(**{key: value})
    assert key in str(error.value)
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k0", 2),
        ("prune_after", 1),
        ("refine_at", 1),
        ("judge_max_retries", 0),
        ("judge_max_attempts", 1),
        ("judge_max_failures", 0.0),
        ("judge_max_failures", 1.0),
        ("format_weight", 0.0),
        ("format_check", "think"),
        ("format_check", r"<a>(?P<answer>.*)</a>"),
        ("max_prompt_length", 1),
        ("buffer_init", "bootstrap"),
    ],
)
def test_the_outermost_good_values_pass(make, key, value):
    assert getattr(make(**{key: value}), key) == value


def test_a_server_needs_a_model_and_a_model_a_server(make):
    with pytest.raises(ValueError, match=r"judge_url is 'http://127\.0\.0\.1:8001/v1' but judge_model is not set"):
        make(judge_url=SERVER["judge_url"])
    with pytest.raises(ValueError, match="judge_model is 'judge' but judge_url is not set"):
        make(judge_model="judge")


def test_reward_weights_are_not_the_users(make):
    with pytest.raises(ValueError, match="reward_weights is set by RankBufferTrainer"):
        make(reward_weights=[1.0, 0.5])


def test_a_generation_batch_holds_whole_groups(make):
    with pytest.raises(ValueError, match=r"generation_batch_size \(12\).*num_generations \(8\)"):
        make(per_device_train_batch_size=12)


@pytest.mark.parametrize(
    ("values", "steps"),
    [
        ({"steps_per_generation": 4, "save_steps": 6}, "4"),
        ({"steps_per_generation": 4, "save_steps": 1}, "4"),
        ({"steps_per_generation": 4, "num_iterations": 2, "save_steps": 12}, "8"),
        ({"num_iterations": 3, "save_steps": 500}, "3"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_steps": 3}, "2"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3, "save_steps": 3}, "1.5"),
    ],
)
def test_a_checkpoint_inside_a_generation_is_refused(make, values, steps):
    with pytest.raises(ValueError) as error:
        make(**values)
    assert f"save_steps={values['save_steps']} would save inside a generation" in str(error.value)
    assert f"= {steps} steps" in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"save_steps": 7},
        {"gradient_accumulation_steps": 4, "save_steps": 7},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2, "save_steps": 7},
        {"steps_per_generation": 4, "save_steps": 8},
        {"steps_per_generation": 4, "num_iterations": 2, "save_steps": 16},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "save_steps": 6},
        {"steps_per_generation": 4, "save_steps": 6, "save_strategy": "no"},
    ],
)
def test_a_checkpoint_between_generations_is_allowed(make, values):
    assert make(**values).save_steps == values["save_steps"]


def test_the_method_is_what_the_fields_say(make):
    assert make().method() == RankBuffer(4, 3, 3, bootstrap=False, static=False, fine=True, anchor_content=True)
    other = make(
        k0=6,
        prune_after=5,
        refine_at=2,
        buffer_init="bootstrap",
        static_buffer=True,
        fine_ranking=False,
        anchor_content=False,
    )
    assert other.method() == RankBuffer(6, 5, 2, bootstrap=True, static=True, fine=False, anchor_content=False)


@pytest.mark.parametrize(
    ("key", "name", "value"),
    [("static_buffer", "static", True), ("fine_ranking", "fine", False), ("anchor_content", "anchor_content", False)],
)
def test_each_switch_reaches_its_own_field(make, key, name, value):
    assert make(**{key: value}).method() == RankBuffer(**{name: value})


def test_without_a_server_the_embedded_judge_answers(make):
    judge = make(judge_max_attempts=5, judge_concurrency=9).judge()
    assert isinstance(judge.client, RubricJudge)
    assert judge.max_attempts == 5
    assert judge._slots._value == 9


def test_the_judge_is_what_the_fields_say(make):
    judge = make(**SERVER, judge_max_tokens=33, judge_timeout=4.5, judge_max_retries=2, judge_max_attempts=7).judge()
    assert isinstance(judge.client, OpenAIClient)
    assert judge.max_attempts == 7
    assert (judge.client.model, judge.client.max_tokens, judge.client._client.max_retries) == ("judge", 33, 2)
    assert judge.client.name == "judge at http://127.0.0.1:8001/v1"
    inner = judge.client._client
    assert (str(inner.base_url), inner.timeout, inner.max_retries) == ("http://127.0.0.1:8001/v1/", 4.5, 2)


def test_the_key_comes_from_the_named_environment_variable(make, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the usual key")
    monkeypatch.setenv("JUDGE_KEY", "the judge's key")
    assert make(**SERVER).judge().client._client.api_key == "the usual key"
    other = make(**SERVER, judge_api_key_env="JUDGE_KEY")
    assert other.judge().client._client.api_key == "the judge's key"
    assert "the judge's key" not in other.to_json_string()
    for name in ("OPENAI_API_KEY", "JUDGE_KEY"):
        monkeypatch.delenv(name)
    assert other.judge().client._client.api_key == "none"


def test_the_usual_key_does_not_stand_in_for_a_named_one(make, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the usual key")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert make(**SERVER, judge_api_key_env="JUDGE_KEY").judge().client._client.api_key == "none"


# Recipes


@pytest.fixture
def parse(monkeypatch):
    """Parses a recipe as on the number of processes of the accelerate configuration that its header names."""

    def parse(path: Path, *more: str):
        text = path.read_text()
        launch = re.search(r"--config_file (accelerate_configs/\S+)", text)
        processes = yaml.safe_load((ROOT / launch[1]).read_text())["num_processes"] if launch else 1
        monkeypatch.setattr(RankBufferConfig, "world_size", processes)
        cpu = [] if yaml.safe_load(text).get("use_cpu") else ["--bf16", "false", "--use_cpu", "true"]
        return make_parser().parse_args_and_config(["--config", str(path), *cpu, *more])

    return parse


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_parses_and_means_what_it_says(parse, path):
    script, training, model = parse(path)
    assert script.dataset_name
    assert model.model_name_or_path
    set_aside = {"bf16", "use_cpu", "report_to"}  # the last becomes a list
    for key, value in yaml.safe_load(path.read_text()).items():
        (found,) = [getattr(part, key) for part in (script, training, model) if hasattr(part, key)]
        assert key in set_aside or str(getattr(found, "value", found)) == str(value), key


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_command_line_wins_over_a_recipe(parse, path):
    script, training, _ = parse(path, "--k0", "3", "--dataset_name", "other.jsonl", "--judge_concurrency", "5")
    assert (script.dataset_name, training.k0, training.judge_concurrency) == ("other.jsonl", 3, 5)


def test_there_are_recipes():
    assert RECIPES


def test_an_unknown_key_is_refused_by_name(parse, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nprune_afetr: 3\n")
    with pytest.raises(ValueError, match="prune_afetr"):
        parse(path)


def test_a_bad_value_in_a_recipe_is_refused_by_name(parse, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nk0: 1\n")
    with pytest.raises(ValueError, match="k0 must be at least 2, got 1"):
        parse(path)


# Documentation of the fields


@pytest.mark.parametrize("field", OWN, ids=lambda field: field.name)
def test_every_field_has_help_and_is_documented_with_its_default(field):
    assert len(field.metadata["help"]) > 10
    assert field.default is not MISSING
    entry = re.search(
        rf"^\s+{field.name} \(`[^`]+`, \*optional\*(?:, defaults to `(.*)`)?\):$", RankBufferConfig.__doc__, re.M
    )
    assert entry, f"{field.name} is not in the docstring"
    documented = entry[1].strip('"') if entry[1] else "None"
    assert documented == str(field.default)


def test_the_docstring_names_no_field_that_is_gone():
    named = re.findall(r"^        (\w+) \(`", RankBufferConfig.__doc__, re.M)
    assert named == [field.name for field in OWN]
    assert len(named) > 15


def test_stock_defaults_are_left_alone():
    ours = {field.name: (field.default, field.default_factory) for field in fields(RankBufferConfig)}
    assert {f.name: (f.default, f.default_factory) for f in fields(GRPOConfig)}.items() <= ours.items()
