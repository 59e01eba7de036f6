"""The configuration: bad values are named before anything is loaded, good ones reach what they configure."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from trl import GRPOConfig

from rankbuffer_lab.audit.command import AuditConfig
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.judge.servers import Servers
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.rewards.rrc_agr import RRCAGR
from rankbuffer_trl.training.config import RankBufferConfig
from rankbuffer_trl.training.parser import RecipeParser

RECIPES = sorted([*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("recipes/**/*.yml")])
STOCK = {field.name for field in fields(GRPOConfig)}
OWN = [field for field in fields(RankBufferConfig) if field.name not in STOCK]
DOCS = JudgeConfig.__doc__ + RankBufferConfig.__doc__
NAN = float("nan")
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
        ("method", "nectar"),
        ("method", "my_package.MyMethod"),
        ("method_args", {"k0": 1}),
        ("method_args", {"k0": -4}),
        ("method_args", {"prune_after": 0}),
        ("method_args", {"refine_at": 0}),
        ("method_args", {"anchors": 4}),
        ("method_args", "[4]"),
        ("method_args", "{k0: 4}"),
        ("judge_free_tokens", -1),
        ("judge_max_retries", -1),
        ("judge_max_attempts", 0),
        ("judge_concurrency", 0),
        ("judge_max_failures", -0.1),
        ("judge_max_failures", 1.5),
        ("judge_timeout", 0.0),
        ("judge_timeout", -3.0),
        ("judge_timeout", float("nan")),
        ("judge_timeout", float("inf")),
        ("judge_wait", -1.0),
        ("judge_wait", float("nan")),
        ("judge_step_timeout", 0.0),
        ("judge_step_timeout", 1800),
        ("judge_decoding", "grammar"),
        ("judge_request", "{temperature: 0}"),
        ("judge_request", "[1]"),
        ("judge_request", ["top_p"]),
        ("format_weight", -0.2),
        ("judge_url", "127.0.0.1:8001"),
        ("judge_url", "ftp://judge"),
        ("judge_model", "Qwen/Qwen3-32B"),
        ("format_check", "(?P<answer"),
        ("max_prompt_length", 0),
        ("max_prompt_length", -5),
        ("format_check", "thnik"),
        ("format_weight", NAN),
        ("judge_timeout", NAN),
        ("judge_step_timeout", NAN),
        ("judge_max_failures", NAN),
        ("judge_prompt_price", NAN),
        ("learning_rate", NAN),
        ("temperature", NAN),
    ],
)
def test_a_bad_value_is_refused_with_key_and_value(make, key, value):
    with pytest.raises(ValueError) as error:
        make(**{key: value})
    if isinstance(value, dict):
        [(key, value)] = value.items()
    assert key in str(error.value)
    assert str(value) in str(error.value) or key == "anchors"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("trust_checkpoint", "false", "must be true or false, got a str"),
        ("judge_guard", "no", "must be true or false, got a str"),
        ("judge_guard", None, "must be true or false, got None"),
        ("scale_by_signal", 1, "must be true or false, got 1"),
        ("resume_with_changes", ["x"], "must be true or false, got a list"),
        ("judge_timeout", None, "must be a finite number, got None"),
        ("judge_timeout", "2", "must be a finite number, got a str"),
        ("judge_wait", {"a": 1}, "must be a finite number, got a dict"),
        ("judge_max_attempts", None, "must be an integer, got None"),
        ("judge_max_attempts", 2.5, "must be an integer, got 2.5"),
        ("judge_concurrency", True, "must be an integer, got True"),
        ("judge_step_timeout", 10**400, "must be a finite number or null, got 1000"),
        ("judge_prompt_price", [1], "must be a finite number or null, got a list"),
        ("judge_model", 5, "must be a text or null, got 5"),
        ("judge_url", 8001, "must be a list, each item a text or null, got 8001"),
        ("judge_url", [["http://a/v1?key=sk-SECRET"]], "must be a list, each item a text or null, got a list"),
        ("judge_api_key_env", ["sk-SECRET"], "must be a text, got a list"),
        ("judge_api_key_env", None, "must be a text, got None"),
        ("method", False, "must be a text, got False"),
        ("format_check", False, "must be a text, got False"),
        ("format_weight", None, "must be a finite number, got None"),
        ("max_prompt_length", "9", "must be an integer or null, got a str"),
        ("num_processes", [2], "must be an integer or null, got a list"),
        ("dry_run", {}, "must be true or false, got a dict"),
    ],
)
def test_a_value_of_another_type_is_refused_and_no_text_is_shown(make, key, value, fault):
    """A recipe can hold anything: `format_check: no` is `False` in YAML, and a key without a value is `None`."""
    with pytest.raises(SettingsError) as error:
        make(**{key: value})
    assert str(error.value).startswith(f"{key} {fault}")
    assert "SECRET" not in str(error.value)


def test_a_program_without_training_checks_types_too():
    with pytest.raises(SettingsError, match="judge_timeout must be a finite number, got None"):
        JudgeConfig(judge_timeout=None)
    with pytest.raises(SettingsError, match="queries must be an integer, got a str"):
        AuditConfig(dataset_name="a.jsonl", queries="5")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method_args", {"k0": 2, "prune_after": 1, "refine_at": 1}),
        ("method", "pairwise_rank"),
        ("method", "rankbuffer_trl.rewards.gdpo.GDPO"),
        ("judge_free_tokens", 0),
        ("judge_max_retries", 0),
        ("judge_max_attempts", 1),
        ("judge_max_failures", 0.0),
        ("judge_max_failures", 1.0),
        ("judge_step_timeout", 1799.5),
        ("judge_request", {"top_p": None}),
        ("format_weight", 0.0),
        ("format_check", "think"),
        ("format_check", r"<a>(?P<answer>.*)</a>"),
        ("max_prompt_length", 1),
    ],
)
def test_the_outermost_good_values_pass(make, key, value):
    assert getattr(make(**{key: value}), key) == value


def test_a_server_needs_a_model_and_a_model_a_server(make):
    with pytest.raises(ValueError, match=r"judge_url is \['http://127\.0\.0\.1:8001/v1'\] but judge_model is not set"):
        make(judge_url=SERVER["judge_url"])
    with pytest.raises(ValueError, match="judge_model is 'judge' but judge_url is not set"):
        make(judge_model="judge")


@pytest.mark.parametrize("path", ["hf-inference/models", "risk-assessment-service", "sk-team", "v1"])
def test_a_path_that_holds_no_key_is_taken(make, path):
    url = f"https://judge.example/{path}"
    (client,) = make(judge_url=url, judge_model="judge").judge().client.clients
    assert client.url == url


def test_a_client_refuses_an_address_with_a_key_too():
    with pytest.raises(SettingsError, match="judge_url has a user, a query or a key in it") as error:
        OpenAIClient("http://judge/v1?api_key=s3cret", "judge")
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        *("http://me:s3cret@127.0.0.1:8001/v1", "https://s3cret@judge", "me:s3cret@judge"),
        *("http://judge/v1?api_key=s3cret", "judge/v1?s3cret", "http://judge/v1#s3cret"),
        *("http://judge/sk-s3cret-123/v1", "https://judge/v1/gsk_s3cret123", "judge/hf_s3cret123"),
    ],
)
def test_a_key_in_a_url_is_refused_and_not_shown(make, url):
    with pytest.raises(ValueError, match="judge_api_key_env") as error:
        make(judge_url=url, judge_model="judge")
    assert "s3cret" not in str(error.value)


def test_reward_weights_are_not_the_users(make):
    with pytest.raises(ValueError, match="reward_weights is set by RankBufferTrainer"):
        make(reward_weights=[1.0, 0.5])


def test_a_generation_batch_holds_whole_groups(make):
    with pytest.raises(ValueError, match=r"generation_batch_size \(12\).*num_generations \(8\)"):
        make(per_device_train_batch_size=12)


@pytest.mark.parametrize(
    "values",
    [
        {"load_best_model_at_end": True},
        {"log_completions_hub_repo": "me/completions"},
        {"vllm_importance_sampling_clip_min": 5.0},
        {"num_generations": 1},
    ],
    ids=str,
)
def test_what_trl_refuses_is_refused_in_its_own_words(make, tmp_path, values):
    base = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    with pytest.raises(ValueError) as stock:
        GRPOConfig(**base | values)
    with pytest.raises(SettingsError) as ours:
        make(**values)
    assert str(ours.value) == str(stock.value)


@pytest.mark.slow
def test_a_machine_without_a_gpu_gets_trls_words(tmp_path):
    """What the README's example says there."""
    program = (
        "import sys; from {} import {} as Config\ntry: Config(sys.argv[1])\nexcept ValueError as error: print(error)"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program.format(module, name), str(tmp_path)],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for module, name in (("trl", "GRPOConfig"), ("rankbuffer_trl", "RankBufferConfig"))
    ]
    assert said[0] == said[1]
    assert "bf16" in said[0]


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


def test_a_checkpoint_of_the_best_step_inside_a_generation_is_refused(make):
    best = dict(save_strategy="best", eval_strategy="steps", metric_for_best_model="loss", steps_per_generation=4)
    with pytest.raises(ValueError, match="eval_steps=6 would save inside a generation"):
        make(**best, eval_steps=6)
    assert make(**best, eval_steps=8).eval_steps == 8
    assert make(**best | {"eval_strategy": "epoch"}).eval_steps is None


def test_a_limit_that_deletes_the_checkpoint_of_a_sigterm_is_refused(make):
    best = dict(save_strategy="steps", eval_strategy="steps", save_steps=5, eval_steps=5, load_best_model_at_end=True)
    with pytest.raises(ValueError, match="save_total_limit=1"):
        make(**best, save_total_limit=1)
    assert make(**best, save_total_limit=2).metric_for_best_model == "loss"
    assert make(save_total_limit=1).save_total_limit == 1


def test_the_librarys_own_sigterm_checkpoint_is_refused(make):
    with pytest.raises(ValueError, match="enable_jit_checkpoint can save inside a generation"):
        make(enable_jit_checkpoint=True)


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


def test_the_method_is_what_the_arguments_say(make):
    assert make().reward_method() == RankBuffer(4, 3, 3, bootstrap=False, static=False, fine=True, anchor_content=True)
    other = make(method_args='{"k0": 6, "bootstrap": true, "fine": false}')
    assert other.reward_method() == RankBuffer(6, 3, 3, bootstrap=True, fine=False)
    assert make(method="rrc_agr", method_args={"references": 3}, seed=5).reward_method() == RRCAGR(5, 3)
    assert make(method="rrc_agr", method_args={"seed": 7}, seed=5).reward_method() == RRCAGR(seed=7)


def test_without_a_server_the_embedded_judge_answers(make):
    judge = make(judge_max_attempts=5, judge_guard=False).judge()
    assert isinstance(judge.client, RubricJudge)
    assert judge.max_attempts == 5
    assert not judge.guard


def test_the_judge_is_what_the_fields_say(make):
    judge = make(
        **SERVER,
        judge_decoding="regex",
        judge_free_tokens=33,
        judge_request='{"top_p": null, "seed": 5}',
        judge_timeout=4.5,
        judge_wait=77.0,
        judge_max_retries=2,
        judge_max_attempts=7,
        judge_concurrency=9,
    ).judge()
    (client,) = judge.client.clients
    assert isinstance(client, OpenAIClient)
    assert (judge.max_attempts, judge.client.wait) == (7, 77.0)
    assert judge.guard
    assert (client.model, client.free_tokens, client.endpoint.max_retries, client.endpoint.concurrency) == (
        "judge",
        33,
        2,
        9,
    )
    assert (client.decoding, client.endpoint.request) == ("regex", {"top_p": None, "seed": 5})
    assert (client.url, client.name) == ("http://127.0.0.1:8001/v1", "judge at http://127.0.0.1:8001/v1")
    inner = client._client
    assert (str(inner.base_url), inner.timeout, inner.max_retries) == ("http://127.0.0.1:8001/v1/", 4.5, 2)


def key_of(settings) -> str:
    (client,) = settings.judge().client.clients
    return client._client.api_key


def test_the_key_comes_from_the_named_environment_variable(make, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-usual-key")
    monkeypatch.setenv("JUDGE_KEY", "the-judge's-key")
    assert key_of(make(**SERVER)) == "the-usual-key"
    other = make(**SERVER, judge_api_key_env="JUDGE_KEY")
    assert key_of(other) == "the-judge's-key"
    assert "the-judge's-key" not in other.to_json_string()
    for name in ("OPENAI_API_KEY", "JUDGE_KEY"):
        monkeypatch.delenv(name)
    assert key_of(make(**SERVER)) == "none"


@pytest.mark.parametrize("value", [None, ""])
def test_the_usual_key_does_not_stand_in_for_a_named_one(make, monkeypatch, value):
    monkeypatch.setenv("OPENAI_API_KEY", "the-usual-key")
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(SettingsError, match="environment variable JUDGE_KEY, which is not set"):
        make(**SERVER, judge_api_key_env="JUDGE_KEY").judge()


@pytest.mark.parametrize("key", ["sk-s3cret\n", "sk-s3cret\x07", "“sk-s3cret”", "sk s3cret", "sk-s3crét"])
@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "JUDGE_KEY"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(make, monkeypatch, name, key):
    monkeypatch.setenv(name, key)
    with pytest.raises(SettingsError, match=f"the environment variable {name} holds a character") as error:
        make(**SERVER, judge_api_key_env=name).judge()
    assert "s3cr" not in str(error.value)


@pytest.mark.parametrize("key", ["sk-s3cret123", "s3cretS3CRET", "", "A B", "A=s3cret"])
def test_a_key_in_place_of_a_variables_name_is_refused_and_not_shown(make, key):
    with pytest.raises(SettingsError, match="judge_api_key_env must be the name of an environment variable") as error:
        make(**SERVER, judge_api_key_env=key)
    assert "s3cret" not in str(error.value)


def test_a_variable_in_small_letters_is_taken_if_it_is_set(make, monkeypatch):
    monkeypatch.setenv("judge_key", "the-key")
    assert key_of(make(**SERVER, judge_api_key_env="judge_key")) == "the-key"


def test_several_servers_share_all_settings(make):
    urls = ["http://127.0.0.1:8001/v1", "http://127.0.0.1:8002/v1"]
    servers = make(judge_url=urls, judge_model="judge", judge_free_tokens=33, judge_concurrency=9).judge().client
    assert isinstance(servers, Servers)
    assert [client.url for client in servers.clients] == urls
    assert {(client.model, client.free_tokens, client.endpoint.concurrency) for client in servers.clients} == {
        ("judge", 33, 9)
    }


@pytest.mark.parametrize(
    ("second", "fault"),
    [("127.0.0.1:8002", "start with http:// or https://, got '127.0.0.1:8002'"), (SERVER["judge_url"], "twice")],
)
def test_each_of_several_servers_is_checked(make, second, fault):
    with pytest.raises(ValueError, match="judge_url") as error:
        make(judge_url=[SERVER["judge_url"], second], judge_model="judge")
    assert fault in str(error.value)


def test_a_step_ends_before_the_other_processes_give_up(make):
    assert make().judge_step_timeout == 0.9 * 1800
    assert make(ddp_timeout=7200).judge_step_timeout == 0.9 * 7200
    assert make(judge_step_timeout=3600.0, ddp_timeout=7200).judge_step_timeout == 3600
    with pytest.raises(ValueError, match=r"judge_step_timeout is 3600 s.* ddp_timeout=1800 s"):
        make(judge_step_timeout=3600.0)


# Recipes


@pytest.fixture
def parse(monkeypatch):
    """Parses a recipe as on the number of processes of the accelerate configuration that its header names."""

    def parse(path: Path, *more: str):
        text = path.read_text()
        if base := yaml.safe_load(text).get("base"):
            text += (ROOT / "recipes" / base).read_text()
        launch = re.search(r"--config_file (accelerate_configs/\S+)", text)
        processes = yaml.safe_load((ROOT / launch[1]).read_text())["num_processes"] if launch else 1
        monkeypatch.setattr(RankBufferConfig, "world_size", processes)
        cpu = [] if yaml.safe_load(text).get("use_cpu") else ["--bf16", "false", "--use_cpu", "true"]
        return RecipeParser().parse_args_and_config(["--config", str(path), *cpu, *more])

    return parse


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_parses_and_means_what_it_says(parse, path):
    script, training, model = parse(path)
    assert script.dataset_name
    assert model.model_name_or_path
    set_aside = {"bf16", "use_cpu", "report_to"}  # the last becomes a list
    lists = {"judge_url"}  # one or several
    recipe = yaml.safe_load(path.read_text())
    recipe.pop("base", None)
    for key, value in recipe.items():
        (found,) = [getattr(part, key) for part in (script, training, model) if hasattr(part, key)]
        value = [value] if key in lists and not isinstance(value, list) else value
        assert key in set_aside or str(getattr(found, "value", found)) == str(value), key


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_command_line_wins_over_a_recipe(parse, path):
    script, training, _ = parse(
        path, "--method_args", "{}", "--dataset_name", "other.jsonl", "--judge_concurrency", "5"
    )
    assert (script.dataset_name, training.method_args, training.judge_concurrency) == ("other.jsonl", {}, 5)


def test_several_servers_fit_on_the_command_line_and_in_a_recipe(parse, tmp_path):
    urls = ["http://127.0.0.1:8001/v1", "http://127.0.0.1:8002/v1"]
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\njudge_model: judge\n")
    assert parse(path, "--judge_url", *urls)[1].judge_url == urls
    path.write_text(path.read_text() + f"judge_url: {urls}\njudge_request: {{top_p: null, seed: 5}}\n")
    assert parse(path)[1].judge_url == urls
    assert parse(path)[1].judge_request == {"top_p": None, "seed": 5}
    assert parse(path, "--judge_request", '{"seed": 6}')[1].judge_request == {"seed": 6}


def test_there_are_recipes():
    assert RECIPES


def test_an_unknown_key_is_refused_by_name(parse, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nprune_afetr: 3\n")
    with pytest.raises(ValueError, match="prune_afetr"):
        parse(path)


def test_a_bad_value_in_a_recipe_is_refused_by_name(parse, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nmethod_args: {k0: 1}\n")
    with pytest.raises(ValueError, match="k0 must be at least 2, got 1"):
        parse(path)


# Defaults


def test_stock_defaults_are_left_alone_but_for_private_pushes():
    ours = {field.name: (field.default, field.default_factory) for field in fields(RankBufferConfig)}
    stock = {field.name: (field.default, field.default_factory) for field in fields(GRPOConfig)}
    assert {name for name in stock if stock[name] != ours[name]} == {"hub_private_repo"}
