"""The configuration: bad values are named before anything is loaded, good ones reach what they configure."""

import re
import sys
from dataclasses import MISSING, dataclass, fields

import pytest
from trl import GRPOConfig

from evaluation.config import EvaluationConfig
from rankbuffer_tools.audit.command import AuditConfig
from rankbuffer_tools.batch.script import read_settings
from rankbuffer_tools.compare.config import CompareConfig
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge._openai_client import OpenAIClient
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.rewards._rrc_agr import RRCAGR
from rankbuffer_trl.settings import described, documented
from rankbuffer_trl.training._config import RankBufferConfig
from recipes.generate_responses import ResponsesConfig
from recipes.generate_rubrics import RubricsConfig

NAN, INF = float("nan"), float("inf")
URL = "http://127.0.0.1:8001/v1"
SERVER = {"judge_url": URL, "judge_model": "judge"}
PRICES = {"judge_prompt_price": 2.0, "judge_completion_price": 4.0}
BEST = {"save_strategy": "best", "eval_strategy": "steps", "metric_for_best_model": "own", "steps_per_generation": 4}
LIMIT = {"save_strategy": "steps", "eval_strategy": "steps", "load_best_model_at_end": True}
LIMIT |= {"metric_for_best_model": "own"}
HALF = {"gradient_accumulation_steps": 2, "save_steps": 3}
INSIDE = "={} would save inside a generation, and that cannot be resumed exactly: one generation lasts"
TIMEOUTS = ("judge_step_timeout", "rollout_timeout")


BASE = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"}


def make(**values) -> RankBufferConfig:
    return RankBufferConfig(**(BASE | {"per_device_train_batch_size": 8, "num_generations": 8} | values))


def refusal(config, values: dict) -> str:
    """Return the words with which settings are refused."""
    try:
        config(**values)
    except SettingsError as error:
        return str(error)
    return "it was taken"


REFUSED = [  # the words of the message after the key, `{}` being the value; then keys with their values
    (" must be at least 0, got {}", {"judge_free_tokens": -1, "judge_max_retries": -1, "judge_wait": -1.0}),
    (" must be at least 0, got {}", {"judge_prompt_price": -1.0, "judge_completion_price": -1.0}),
    (" must be at least 1, got {}", {"judge_max_attempts": 0, "judge_concurrency": 0, "reference_groups": 0}),
    (" must be at most 100, got {}", {"judge_samples": 101}),
    (" must be at most 200 groups, got {}", {"reference_groups": 201}),
    (" must be above 0 seconds, got {}", {"judge_timeout": 0.0, "judge_step_timeout": 0.0, "rollout_timeout": 0.0}),
    *((" is a share in 0..1, got {}", {"judge_max_failures": share}) for share in (-0.1, 1.5)),
    *((" is 1800 s, but the other processes give up after ddp_timeout=1800 s", {key: 1800}) for key in TIMEOUTS),
    (" is '{}' but judge_url is not set", {"judge_model": "judge"}),
    (" is ['{}'] but judge_model is not set", {"judge_url": URL}),
    (" must start with http:// or https://, got '{}'", {"judge_url": "127.0.0.1:8001"}),
    (" must be 'think', 'none' or a regular expression", {"format_check": "(?P<answer"}),
    (" must be 'think', 'none' or a regular expression with a group (?P<answer>...); '{}'", {"format_check": "thnik"}),
    (" is set by RankBufferTrainer", {"reward_weights": [1.0, 0.5]}),
    (" is for dry_run and preflight_only; the processes of a run", {"num_processes": 2}),
    (" can save inside a generation, and at another step on each process", {"enable_jit_checkpoint": True}),
    (" takes away query_id", {"remove_unused_columns": True}),
    (" begins the epoch again after a resume", {"ignore_data_skip": True}),
    (": split_batches gives each process a part", {"accelerator_config": {"split_batches": True}}),
    (
        ": rankbuffer has no argument 'anchors' (did you mean max_anchors?); it has k0, ",
        {"method_args": {"anchors": 4}},
    ),
    (" must be a JSON object, got {}", {"method_args": [4], "judge_request": ["top_p"]}),
    (" must be a JSON object, got {}", {"chat_template_kwargs": "[1]", "model_init_kwargs": [1]}),
    (" has a token: run", {"model_init_kwargs": {"token": "hf_s3cret"}}),
    *((f" must not set {key}", {"judge_request": {key: 0}}) for key in ("messages", "model", "stream")),
    (" is not JSON (Expecting property name", {"method_args": "{k0: 4}", "judge_request": "{temperature: 0}"}),
    # what YAML can hold: `format_check: no` is `False`, and a key without a value is `None`
    (" must be a finite number, got {}", {"judge_timeout": NAN, "judge_wait": INF, "judge_max_failures": None}),
    (" must be a finite number, got a str", {"judge_timeout": "2"}),
    (" must be a finite number or null, got 1000", {"judge_step_timeout": 10**400}),
    (" must be a finite number or null, got a list", {"judge_prompt_price": [1]}),
    (" must be a number, got {}", {"learning_rate": NAN, "temperature": NAN}),
    (" must be an integer, got {}", {"judge_max_attempts": 2.5, "judge_concurrency": True, "seed": 1.5}),
    (" must be an integer or null, got {}", {"num_generations": 8.0, "steps_per_generation": True}),
    (" must be a finite number, got [1]", {"learning_rate": [1]}),
    (" must be true or false or null, got {}", {"bf16": 1}),
    (" must be at least 1, got {}", {"per_device_train_batch_size": 0, "num_generations": 0, "num_iterations": 0}),
    (" must be at least 1, got {}", {"gradient_accumulation_steps": 0, "steps_per_generation": 0}),
    (" must be at least 1, got {}", {"max_completion_length": -5, "dry_run_queries": -1, "max_prompt_length": 0}),
    (" must be at least 1, or -1 for num_train_epochs, got {}", {"max_steps": 0}),
    (" must be at least 0, got {}", {"seed": -1, "format_weight": -0.2}),
    (" must be above 0, got {}", {"temperature": 0.0, "num_train_epochs": -1.0, "top_p": 0.0, "save_steps": -3}),
    (" must be above 0, got {}", {"judge_token_budget": 0, "learning_rate": 0.0}),
    (" must be at most 1, got {}", {"top_p": 1.5}),
    (" is empty: name a folder", {"output_dir": ""}),
    *((" {} is a file or lies below one: name a folder", {"output_dir": __file__ + end}) for end in ("", "/run")),
    (" must be an integer or null, got a str", {"max_prompt_length": "9"}),
    (" must be true or false, got {}", {"scale_by_signal": 1, "hub_private_repo": None}),
    (" must be true or false, got a str", {"judge_guard": "no"}),
    (" must be a text, got {}", {"method": False, "format_check": False}),
    (" must be a text or null, got {}", {"judge_model": 5}),
    (" must be a text, got a list", {"judge_api_key_env": ["s3cret"]}),
    (" must be a list, each item a text or null, got {}", {"judge_url": 8001}),
    (" must be a list, each item a text or null, got a list", {"judge_url": [["http://a/v1?key=s3cret"]]}),
    (" must be one of 'regex', 'json_schema', 'none', got '{}'", {"judge_decoding": "grammar"}),
    (" must be one of 'regex', 'json_schema', 'none', got a list", {"judge_decoding": ["sk-s3cret"]}),
]
KEYS_IN_URLS = (
    *("http://me:s3cret@127.0.0.1:8001/v1", "me:s3cret@judge", "http://judge/v1?api_key=s3cret", "judge/v1?s3cret"),
    *("http://judge/v1#s3cret", "http://judge/sk-s3cret-123/v1", "http://a/gsk_s3cret123", "judge/hf_s3cret123"),
    *("https://judge/xai-s3cret123", "https://judge/nvapi-s3cret123", "http://judge/v1;api_key=s3cret"),
    *("http://me:s3cret@gate/https://b/v1", "http://b/v1?key=s3cret&to=http://b/v1", "http://b/v1%3Fkey=s3cret"),
    *("http://b/token=s3cret", "http://b/AIzas3cret-123", "http://b/v1/x-sk-s3cret-123", "http://sk-s3cret-123.b/v1"),
    *("http://b/AKIAs3cretS3CRET0123/v1", "http://b/ghp_s3cret0123456789", "http://b/v1/pplx-s3cret0123456789"),
    *("https://gate/SK-s3cret-123/v1", "https://gate/https://s3cret/v1", "http://[s3cret", "http://b/v1\ns3cret"),
)
SCALED = {"scale_rewards": "none"}
TAKES_OUT = {"scale_rewards": "group"}, {"scale_rewards": True}, {"multi_objective_aggregation": "normalize_then_sum"}
CONTINUOUS = ("use_transformers_continuous_batching", "use_transformers_paged")
HALVES = {"bf16": True}, {"bf16": None}, {"fp16": True}, {"bf16": True, "dry_run": True}
REFUSED_TOGETHER = [  # the first words of the message, then all settings
    ("hub_always_push uploads what later steps have saved", {"hub_always_push": True, "push_to_hub": True}),
    *((f"{key} with bf16 or fp16 makes TRL cast the", {key: True} | half) for key in CONTINUOUS for half in HALVES),
    ("k0 must be at least 2, got 1", {"method_args": {"k0": 1}}),
    *((f"{key} must be at least 1, got 0", {"method_args": {key: 0}}) for key in ("prune_after", "refine_at")),
    ("judge_url must start with http:// or https://, got 'ftp://b'", {**SERVER, "judge_url": [URL, "ftp://b"]}),
    ("judge_url is empty", {**SERVER, "judge_url": ""}),
    ("judge_url names a server twice", {**SERVER, "judge_url": [URL, URL]}),
    *(("vllm_server_base_url has a user", {"vllm_server_base_url": url}) for url in KEYS_IN_URLS),
    ("vllm_server_base_url must start with http", {"vllm_server_base_url": "b:8000"}),
    ("vllm_server_host has a user", {"vllm_server_host": "me:s3cret@b"}),
    *(("scale_by_signal has no effect unless", {"scale_by_signal": True, **SCALED, **other}) for other in TAKES_OUT),
    *(("judge_url has a user, a query or a key in it", {**SERVER, "judge_url": url}) for url in KEYS_IN_URLS),
    *(
        (f"judge_url has no port between 1 and 65535, got 'http://b:{n}'", SERVER | {"judge_url": f"http://b:{n}"})
        for n in (0, 65536)
    ),
    *(
        ("judge_api_key_env must be the name of an environment variable", {**SERVER, "judge_api_key_env": key})
        for key in ("sk-s3cret123", "s3cretS3CRET", "", "A B", "A=s3cret")
    ),
    ("judge_price_budget must be above 0, got -1.0", {**PRICES, "judge_price_budget": -1.0}),
    *(("judge_price_budget needs judge_", {**PRICES, "judge_price_budget": 1.0, key: None}) for key in PRICES),
    ("num_processes must be at least 1, got 0", {"num_processes": 0, "dry_run": True}),
    ("save_steps" + INSIDE.format(6), {"steps_per_generation": 4, "save_steps": 6}),
    ("save_steps" + INSIDE.format(12), {"steps_per_generation": 4, "num_iterations": 2, "save_steps": 12}),
    ("save_steps" + INSIDE.format(500), {"num_iterations": 3, "save_steps": 500}),
    *(("save_steps" + INSIDE.format(3), HALF | {"steps_per_generation": n}) for n in (4, 3)),
    ("eval_steps" + INSIDE.format(6), {**BEST, "eval_steps": 6}),
    ("save_total_limit=1 with metric_for", {**LIMIT, "save_steps": 5, "eval_steps": 5, "save_total_limit": 1}),
    ("generation_batch_size (12) must be divisible by num_generations (8).", {"per_device_train_batch_size": 12}),
]


def test_config_refuses_a_bad_value_in_one_line_and_shows_no_key():
    alone = [(key + words.format(value), {key: value}) for words, each in REFUSED for key, value in each.items()]
    for words, values in alone + REFUSED_TOGETHER:
        said = refusal(make, values)
        assert said.startswith(words), f"{values}: {said}"
        assert "s3cret" not in said and "\n" not in said, values
    assert "= 1.5 steps. Make it a whole number, or set" in refusal(make, {**HALF, "steps_per_generation": 3})
    key_in_url = {"url": "http://judge/v1?key=s3cret", "model": "judge"}
    for config, values, words in (
        (JudgeConfig, {"judge_timeout": None}, "judge_timeout must be a finite number, got None"),
        (AuditConfig, {"dataset_name": "a.jsonl", "queries": "5"}, "queries must be an integer, got a str"),
        (EvaluationConfig, {"models": ["a"], "engine": "x"}, "engine must be one of 'vllm', 'transformers', got 'x'"),
        (OpenAIClient, key_in_url, "judge_url has a user, a query or a key"),
    ):
        assert refusal(config, values).startswith(words), values


def test_config_refuses_the_key_itself_in_an_address_and_takes_what_only_looks_random(monkeypatch):
    monkeypatch.setenv("GATE", "s3cret-of-no-known-form")
    values = SERVER | {"judge_api_key_env": "GATE"}
    said = refusal(make, values | {"judge_url": "http://b/s3cret-of-no-known-form/v1"})
    assert said.startswith("judge_url has a user") and "s3cret" not in said
    make(**values | {"judge_url": "http://b:65535/asia-southeast1/0123456789abcdef0123456789abcdef/v1"})


def test_config_takes_the_outermost_good_values():
    for values in (
        {"method_args": {"k0": 2, "prune_after": 1, "refine_at": 1}},
        *({"method": name} for name in ("pairwise_rank", "rankbuffer_trl.rewards._gdpo.GDPO")),
        *({"judge_free_tokens": 0}, {"judge_max_retries": 0}, {"judge_max_attempts": 1}, {"judge_wait": 0.0}),
        *({"judge_max_failures": 0.0}, {"judge_max_failures": 1.0}, {"judge_step_timeout": 1799.5}),
        {"rollout_timeout": 1799.5},
        *({"judge_concurrency": 1}, {"judge_prompt_price": 0.0}, {"judge_request": {"top_p": None}}),
        *({"format_weight": 0.0}, {"format_check": "think"}, {"format_check": r"<a>(?P<answer>.*)</a>"}),
        *({"max_prompt_length": 1}, {"save_steps": 7}, {"save_steps": 7, "gradient_accumulation_steps": 4}),
        {"save_steps": 7, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
        *({"save_steps": n, "steps_per_generation": 4} for n in (4, 8)),
        {"save_steps": 16, "steps_per_generation": 4, "num_iterations": 2},
        {"save_steps": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {"save_steps": 6, "steps_per_generation": 4, "save_strategy": "no"},
        {"save_strategy": "epoch", **HALF, "steps_per_generation": 3},
        *({"eval_steps": 8, **BEST}, {"eval_steps": None, **BEST, "eval_strategy": "epoch"}),
        *({"save_total_limit": 1}, {"save_total_limit": 2, **LIMIT, "save_steps": 5, "eval_steps": 5}),
        *({"num_processes": 1, "dry_run": True}, {"num_processes": 3, "preflight_only": True}),
        *({"judge_step_timeout": 3600.0, "ddp_timeout": 7200}, {"judge_token_budget": 1}),
    ):
        key, value = next(iter(values.items()))
        assert getattr(make(**values), key) == value, values
    for limit in (1800, 7200):
        args = make(ddp_timeout=limit)
        assert (args.judge_step_timeout, args.rollout_timeout) == (0.9 * limit, 0.5 * limit)
    hosts = ("judge:80/hf-inference/models", "a.b/risk-assessment-service/", "judge/sk-team", "[::1]:8001/v1", "ä-b")
    for place in hosts:  # none of them holds a key
        url = f"https://{place}"
        (client,) = make(judge_url=url, judge_model="judge", vllm_server_base_url=url).judge().client.clients
        assert (client.url, client.server) == (url, place.split("/")[0])


def test_config_refuses_a_best_checkpoint_that_rounding_would_choose(monkeypatch):
    same = "reward", "eval_reward", "eval_reward_std", "eval_rewards/rank_reward/mean", "loss", "eval_loss"
    for metric in same:
        said = refusal(make, {**LIMIT, "metric_for_best_model": metric})
        assert "the same for every policy" in said and "rankbuffer-compare" in said
    assert refusal(make, {**LIMIT, "metric_for_best_model": None}).startswith("metric_for_best_model=loss")
    own = {"reward_functions": [{"function": "trl.rewards.think_format_reward", "weight": 0.5}]}
    make(**{**LIMIT, "metric_for_best_model": "eval_rewards/format_reward/mean"})
    unweighted = {"reward_functions": [{"function": "trl.rewards.think_format_reward", "weight": 0}]}
    assert refusal(make, {**LIMIT, **unweighted, "metric_for_best_model": "eval_reward"})
    for metric in "eval_reward", "eval_rewards/numbers/mean", "own":
        make(**{**LIMIT, **own, "metric_for_best_model": metric})
    for metric in same[3:]:
        assert refusal(make, {**LIMIT, **own, "metric_for_best_model": metric})


def test_config_refuses_what_trl_refuses_in_its_own_words():
    for values in (
        *({"load_best_model_at_end": True}, {"log_completions_hub_repo": "me/completions"}, {"num_generations": 1}),
        {"vllm_importance_sampling_clip_min": 5.0},
    ):
        with pytest.raises(ValueError) as stock:
            GRPOConfig(**BASE | values)
        assert refusal(make, values) == str(stock.value)


@pytest.mark.parametrize("there", [False, True])
def test_config_takes_the_cpu_and_says_so_on_a_machine_without_a_gpu(monkeypatch, caplog, there):
    monkeypatch.setattr("torch.accelerator.is_available", lambda: there)
    values = {"output_dir": "out", "bf16": False, "report_to": "none"}
    args = RankBufferConfig(**values)
    assert (args.use_cpu, "the policy trains on the CPU" in caplog.text) == (not there, not there)
    caplog.clear()
    RankBufferConfig(**values, use_cpu=True)
    assert not caplog.text, "nothing to say to who asked for it"
    assert not RankBufferConfig(**values, use_vllm=True).use_cpu, "vLLM needs the GPU that is missing"
    if not there:
        with pytest.raises(SettingsError, match="no GPU is visible, and use_vllm and bf16 mean one: see nvidia-smi"):
            RankBufferConfig(**values | {"bf16": None}, use_vllm=True)


def test_config_makes_no_public_page_of_the_curves_unless_it_is_named():
    pages = {None: False, False: False, "false": False, "me/curves": "me/curves"}
    assert {given: make(trackio_static_space_id=given).trackio_static_space_id for given in pages} == pages


def test_reward_method_is_what_the_arguments_say():
    assert make().reward_method() == RankBuffer(4, 3, 3, bootstrap=False, static=False, fine=True, anchor_content=True)
    other = make(method_args='{"k0": 6, "bootstrap": true, "fine": false}')
    assert other.reward_method() == RankBuffer(6, 3, 3, bootstrap=True, fine=False)
    shown = {"max_completion_length": 1024}
    for tokens, own, most in ((18_128, {}, 13), (18_127, {}, 12), (900, {}, 4), (18_128, {"max_anchors": 5}, 5)):
        assert make(judge_context=tokens, method_args=own, **shown).reward_method().max_anchors == most
    assert make(judge_context=18_128, judge_guard=False, **shown).reward_method().max_anchors == 13, "as with it"
    assert make(judge_context=9000, method_args={"anchor_content": False}).reward_method().max_anchors is None, (
        "hidden"
    )
    assert make(method="rrc_agr", method_args={"references": 3}, seed=5).reward_method() == RRCAGR(5, 3)
    assert make(method="rrc_agr", method_args={"seed": 7}, seed=5).reward_method() == RRCAGR(seed=7)


# The judge


def test_judge_request_must_not_make_copies_of_the_samples():
    for key, value in ("n", 1), ("temperature", 0.0), ("temperature", None):
        with pytest.raises(SettingsError, match=f"judge_request must not set {key}"):
            make(**SERVER, judge_samples=2, judge_request={key: value})
        assert make(**SERVER, judge_request={key: value}).judge_request == {key: value}


def test_judge_is_what_the_fields_say():
    embedded = make(judge_max_attempts=5, judge_guard=False).judge()
    assert isinstance(embedded.client, RubricJudge) and (embedded.max_attempts, embedded.guard) == (5, False)
    limits = {"judge_timeout": 4.5, "judge_max_retries": 2, "judge_concurrency": 9, "judge_wait": 77.0}
    servers = {"judge_url": [URL, "http://127.0.0.1:8002/v1"], "judge_model": "judge"}
    settings = make(**servers, judge_request='{"top_p": null, "seed": 5}', **limits, **PRICES)
    others = make(**SERVER, judge_max_attempts=7, judge_decoding="regex", judge_free_tokens=33, judge_samples=5)
    for guarded in (settings, others):
        judge = guarded.judge()
        assert isinstance(judge.client, Servers) and judge.guard and judge.client.wait == guarded.judge_wait
        assert [client.url for client in judge.client.clients] == guarded.judge_url
        for client in judge.client.clients:
            assert (client.model, client.name) == ("judge", f"judge at {client.url}")
            assert (client.decoding, client.free_tokens) == (guarded.judge_decoding, guarded.judge_free_tokens)
            assert client.samples == guarded.judge_samples
            assert client.endpoint.request == (guarded.judge_request or {})
            assert client.turns.most == guarded.judge_concurrency
            inner = client._client
            assert str(inner.base_url) == f"{client.url}/"
            assert (inner.timeout, inner.max_retries) == (guarded.judge_timeout, guarded.judge_max_retries)
    assert judge.max_attempts == 7
    assert (settings.endpoint.prompt_price, settings.endpoint.completion_price) == (2.0, 4.0)
    assert EvaluationConfig(models=["a"], **SERVER, judge_max_attempts=2).judge().max_attempts == 2


def key_of(settings) -> str:
    (client,) = settings.judge().client.clients
    return client._client.api_key


def test_judge_has_the_key_of_the_named_environment_variable_alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-usual-key")
    monkeypatch.setenv("JUDGE_KEY", "the-judge's-key")
    monkeypatch.setenv("judge_key", "a-small-key")
    other = make(**SERVER, judge_api_key_env="JUDGE_KEY")
    assert (key_of(make(**SERVER)), key_of(other)) == ("the-usual-key", "the-judge's-key")
    assert key_of(make(**SERVER, judge_api_key_env="judge_key")) == "a-small-key"
    assert "the-judge's-key" not in other.to_json_string()
    for name in ("JUDGE_KEY", "NO_KEY"):
        monkeypatch.setenv("JUDGE_KEY", "")
        with pytest.raises(SettingsError, match=f"environment variable {name}, which is not set"):
            make(**SERVER, judge_api_key_env=name).judge()
    for name in ("OPENAI_API_KEY", "JUDGE_KEY"):
        for key in ("sk-s3cret\n", "sk-s3cret\x07", "“sk-s3cret”", "sk s3cret", "sk-s3crét"):
            monkeypatch.setenv(name, key)
            with pytest.raises(SettingsError, match=f"the environment variable {name} holds a character") as error:
                make(**SERVER, judge_api_key_env=name).judge()
            assert "s3cr" not in str(error.value), key
    monkeypatch.delenv("OPENAI_API_KEY")
    assert key_of(make(**SERVER)) == "none"


# Each program has the settings that it uses


def test_read_settings_takes_the_judge_of_a_recipe_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("judge_free_tokens: 7\nqueries: 3\n")
    words = ["--recipe", "paper/rankbuffer.yaml", "--config", str(tmp_path / "own.yaml"), "--judge_model", "mine"]
    for given in (words, words[:1] + words[2:]):
        monkeypatch.setattr("sys.argv", ["audit", "--dataset_name", "a", "--samples", "b", *given])
        if given is words:
            found = read_settings(AuditConfig)
            assert (found.judge_guard, found.judge_decoding, found.judge_model) == (False, "regex", "mine")
            assert (found.judge_free_tokens, found.queries, found.output_dir) == (7, 3, "runs/audit")
        else:
            with pytest.raises(SettingsError, match="there is no recipe"):
                read_settings(AuditConfig)


def test_read_settings_refuses_a_key_that_has_no_effect(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("")
    rest = ["--dataset_name", "a.jsonl", "--output_file", "b.jsonl"]
    programs = {
        RubricsConfig: ([*rest, "--generic"], "decoding free_tokens guard max_failures step_timeout"),
        ResponsesConfig: ([*rest, "--sampler_url", URL, "--sampler_model", "m"], "max_failures step_timeout"),
        EvaluationConfig: (["--models", "a"], "decoding free_tokens guard client client_args step_timeout"),
        AuditConfig: (["--dataset_name", "a.jsonl", "--samples", "a.jsonl"], "step_timeout"),
    }
    for config, (words, gone) in programs.items():
        for key in (f"judge_{name}" for name in gone.split()):
            assert key not in {each.name for each in fields(config)}
            (tmp_path / "a.yaml").write_text(f"{key}: 3\n")
            for more in ([f"--{key}", "3"], [f"--{key}=3"], ["--config", str(tmp_path / "a.yaml")]):
                monkeypatch.setattr(sys, "argv", ["program", *words, *more])
                said = f"^{key} is a setting of other programs and has no effect here"
                with pytest.raises(SettingsError, match=said):
                    read_settings(config)
        monkeypatch.setattr(sys, "argv", ["program", "--judge_modle", "3"])  # before what is not set
        with pytest.raises(SettingsError, match=r"judge_modle. .did you mean judge_model"):
            read_settings(config)


def test_documented_takes_the_help_from_the_docstring():
    @documented
    @dataclass
    class Good:
        """A class.

        Args:
            share (`float`, *optional*, defaults to `0.5`):
                A share, such as 50 % or
                less. It has a second sentence.
        """

        share: float = 0.5

    assert fields(Good)[0].metadata["help"] == "A share, such as 50 %% or less."
    with pytest.raises(ValueError, match="the docstring of Bad says nothing of other"):
        documented(dataclass(type("Bad", (Good,), {"__annotations__": {"other": int}, "other": 3})))


def test_documented_defaults_are_those_of_the_fields():
    for config in (RankBufferConfig, EvaluationConfig, AuditConfig, CompareConfig, RubricsConfig, ResponsesConfig):
        defaults = {each.name: each.default for each in fields(config) if each.default is not MISSING}
        own = [cls for cls in config.__mro__ if not cls.__module__.startswith(("trl.", "transformers."))]
        texts = {name: kind for cls in own for name, (kind, _) in described(cls).items()}
        assert defaults.keys() - {each.name for each in fields(GRPOConfig)} <= texts.keys()
        for name in defaults.keys() & texts.keys():
            said = re.search(r"\*optional\*(?:, defaults to `\"?(.*?)\"?`)?$", texts[name])
            assert said is None or str(said[1]) == str(defaults[name]), f"{config.__name__}.{name}"


def test_config_changes_one_default_of_trl():
    ours = {field.name: (field.default, field.default_factory) for field in fields(RankBufferConfig)}
    stock = {field.name: (field.default, field.default_factory) for field in fields(GRPOConfig)}
    assert {name for name in stock if stock[name] != ours[name]} == {"hub_private_repo"}


# Recipes


def test_recipe_may_name_several_servers_and_no_unknown_key(tmp_path):
    path, urls = tmp_path / "recipe.yaml", [URL, "http://127.0.0.1:8002/v1"]

    def parse(recipe: str, *words: str) -> RankBufferConfig:
        path.write_text("output_dir: out\nuse_cpu: true\nbf16: false\n" + recipe)
        return RecipeParser().parse_args_and_config(["--config", str(path), *words])[1]

    assert parse("judge_model: judge\n", "--judge_url", *urls).judge_url == urls
    recipe = f"judge_model: judge\njudge_url: {urls}\njudge_request: {{top_p: null, seed: 5}}\n"
    assert parse(recipe).judge_url == urls and parse(recipe).judge_request == {"top_p": None, "seed": 5}
    assert parse(recipe, "--judge_request", '{"seed": 6}').judge_request == {"seed": 6}
    for wrong, words in (("prune_afetr: 3", "prune_afetr"), ("method_args: {k0: 1}", "k0 must be at least 2, got 1")):
        with pytest.raises(SettingsError, match=words):
            parse(wrong)
