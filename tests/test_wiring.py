"""Each setting of each program reaches its other end, and a new one without a row here fails."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from datasets import Dataset
from helpers.evaluation_assets import build, text_of, verdict
from helpers.nectar_rows import RUBRICS, raw_row
from helpers.programs import start
from helpers.wiring import Ends, To, base, needed, plain, sent, settings_of, value_of
from test_commands import PROGRAMS
from test_format import of_trl
from transformers import AutoTokenizer

from evaluation.config import EvaluationConfig
from rankbuffer_tools.audit.command import AuditConfig
from rankbuffer_tools.batch.output import write_rows
from rankbuffer_tools.compare.config import CompareConfig
from rankbuffer_tools.data import command as data_command
from rankbuffer_tools.data.nectar import to_row
from rankbuffer_tools.data.tokens import TokenCounter
from rankbuffer_tools.report import command as report_command
from rankbuffer_tools.train.parser import JUDGE_FIELDS, RANKBUFFER_FIELDS, SETTINGS_GROUPS
from rankbuffer_trl._answers import AnswerExtractor
from rankbuffer_trl._group_ranker import GroupRanker
from rankbuffer_trl.data._queries import GENERIC_RUBRICS
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.training._config import RankBufferConfig
from rankbuffer_trl.training._reward_function import RankBufferReward
from rankbuffer_trl.training._rollouts import separate_rollouts
from rankbuffer_trl.training._trainer import RankBufferTrainer
from recipes.generate_responses import ResponsesConfig
from recipes.generate_rubrics import RubricsConfig
from recipes.prepare_nectar import NectarConfig

pytestmark = pytest.mark.usefixtures("cache")

CLIENT = {"judge_client", "judge_client_args"}  # they name another judge, so they have a test of their own
STARTS: dict[str, tuple[str, Any, Callable, Callable | None]] = {}


def starts(program: str, owner: Any, play: Callable | None = None) -> Callable:
    """Take a function for a start of a program: it opens doors, and returns a row for each setting.

    `owner` has the settings, and `play` starts the program with the values of the rows.
    """

    def take(function: Callable) -> Callable:
        STARTS[function.__name__] = (program, owner, function, play)
        return function

    return take


@pytest.fixture
def at(tmp_path, howto, monkeypatch, run, tiny_policy):
    """The places of a start, with a model that takes notes."""
    for name in ("JUDGE", "SAMPLER", "OWN"):
        monkeypatch.setenv(f"{name}_KEY", f"{name.lower()}-k3y")
    sets, ends = tmp_path / "sets", Ends(monkeypatch)
    which = {"prompt": "Which?", "rubrics": [{"text": "Is high.", "weight": 1}], "responses": [*"1234"]}
    files = {
        "mine": howto,
        "bare": [{"query_id": row["query_id"], "prompt": row["prompt"]} for row in howto[:3]],
        "ranked": [{key: row[key] for key in ("query_id", "prompt", "responses")} for row in howto[:3]],
        "numbers": [which | {"query_id": f"q{i}"} for i in range(4)],
        "nectar": [raw_row(number, howto) for number in range(9)],
    }
    (sets / "split").mkdir(parents=True)
    for name, rows in {**files, "split/test": howto}.items():
        write_rows(sets / f"{name}.jsonl", rows)
    splits = ("held", "seen")
    parts = [{"config_name": n, "data_files": [{"split": s, "path": f"{n}.jsonl"} for s in splits]} for n in files]
    (sets / "README.md").write_text(f"---\nconfigs: {json.dumps(parts)}\n---\n")
    ends.door("rankbuffer_trl.judge._judge.Judge.__init__", when=lambda given: isinstance(given["client"], Servers))
    ends.door("rankbuffer_trl.judge._servers.Servers.__init__")
    ends.door("rankbuffer_trl.judge._openai_client.OpenAIClient.__init__")
    places = {"tmp": tmp_path, "out": tmp_path / "out", "sets": sets, "run": str(run.path), "policy": tiny_policy}
    with ends.serving():
        yield SimpleNamespace(ends=ends, howto=howto, **places)


def data(at, config: str = "mine") -> dict:
    """The settings of a data set that can be loaded by all three together alone."""
    return needed(dataset_name=str(at.sets), dataset_config=config, dataset_train_split="held")


def server(at) -> dict:
    """The settings of a model behind servers."""
    rows = {"judge_timeout": 77.0, "judge_wait": 66.0, "judge_max_retries": 2, "judge_max_attempts": 5}
    rows |= {"judge_concurrency": 9, "judge_prompt_price": 2.0, "judge_cached_price": 0.5}
    return rows | {
        "judge_url": To([at.ends.url], "POST "),
        "judge_model": To("mine", '"model": "mine"'),
        "judge_api_key_env": To("JUDGE_KEY", "Bearer judge-k3y"),
        "judge_request": To({"top_a": 7}, '"top_a": 7'),
        "judge_headers": To({"X-Run": "7"}, '"X-Run": "7"'),
        "judge_completion_price": To(4.0, "at the prices given"),
    }


def judge(at) -> dict:
    """The settings of a judge. `judge_max_failures` has a row where it is used."""
    rows = server(at) | {"judge_decoding": To("json_schema", '"response_format"'), "judge_free_tokens": 99}
    return rows | {"judge_guard": False, "judge_samples": To(6, lambda ends: "6" in ends.given["samples"])}


def listwise() -> dict:
    """The settings of a reward method that a door of `load_method` sees."""
    return {
        "method": To("listwise", {"name": "listwise"}),
        "method_args": To({"passes": 4}, {"arguments": {"passes": 4}}),
    }


def run_program(program: str, owner: Any, at, values: dict, fails: bool = False) -> None:
    """Start a program with settings, from a file if it reads one. The line with which it fails is noted."""
    (at.tmp / "all.yaml").write_text(json.dumps(values))  # which is YAML, too
    words = ["--config", str(at.tmp / "all.yaml")]
    if hasattr(owner, "_actions"):
        words = owner.prog.split()[1:]
        for action in (each for each in owner._actions if each.dest in values):
            value = values[action.dest]
            listed = value if isinstance(value, list) else [value]
            words += [*action.option_strings[:1], *(str(each) for each in listed if each is not True)]
    try:
        start(program, words)
    except SystemExit as end:
        assert bool(end.code) == fails, end.code
        at.ends.lines.append(str(end.code))


# The audit


@starts("rankbuffer-audit", AuditConfig)
def audit(at) -> dict:
    at.ends.doors("rankbuffer_tools.audit.command", "ask_everything Audit")
    samples, texts = at.tmp / "samples.jsonl", lambda row: [f"{text} Indeed." for text in row["responses"]]
    write_rows(samples, [{"query_id": row["query_id"], "responses": texts(row)} for row in at.howto])
    return {**judge(at), **data(at), "judge_max_failures": 0.75, "seed": 5} | {
        "samples": To(str(samples), "Indeed."),
        "queries": To(6, "[price] 6 queries: "),
        "probabilities": To(False, {"soft": False}),
        "output_dir": To(str(at.out), "file audit.json"),
    }


@starts("rankbuffer-audit", AuditConfig)
def audit_of_a_card(at) -> dict:
    rows = base(queries=6, output_dir=str(at.out), probabilities=False)
    return rows | {"card": To("My-judge", "My-judge")}


# Comparisons


def comparison(at) -> dict:
    """The rows of all starts of a comparison."""
    at.ends.doors("rankbuffer_tools.compare.command", "draw ask_many")
    return data(at, "numbers") | {"output": To(str(at.out / "mine.json"), "file mine.json")}


@starts("rankbuffer-compare", CompareConfig)
def epochs(at) -> dict:
    at.ends.answer = lambda body: '{"winner": "A"}'  # the embedded judge needs rubrics
    rows = judge(at) | comparison(at) | {"judge_max_failures": To(0.75, {"max_failures": 0.75}), "seed": 5}
    return rows | needed(run_dir=at.run) | {
        "epochs": [1, 0],
        "duels": To(3, "[price] 3 duels"),
        "probabilities": To(True, '"n": 6'),
        "no_rubrics": To(True, lambda ends: "\\nRUBRICS" not in ends.asked),
        "show": To(1, lambda ends: "\n".join(ends.lines).count("\n== ") == 1),
    }  # fmt: skip


@starts("rankbuffer-compare", CompareConfig)
def dry(at) -> dict:
    rows = base(run_dir=at.run, **{name: value_of(row) for name, row in comparison(at).items()})
    return rows | {"dry_run": To(True, lambda ends: not ends.asked)}


@starts("rankbuffer-compare", CompareConfig)
def two_policies(at) -> dict:
    """The first is served already, and the second one by a command."""
    at.ends.answer = lambda body: "<t>hm</t>Tea."
    started = contextmanager(lambda *args: (yield at.ends.url))
    at.ends.door("rankbuffer_tools.batch.engines.vllm_server", instead=started)
    rows = comparison(at) | base(judge_max_failures=1.0, duels=2)
    rows |= sent(temperature=0.31, top_p=0.32, top_k=17, chat_template_kwargs={"enable_thinking": False})
    return rows | {
        "models": To([f"mine={at.ends.url}", f"sampler={at.policy}"], '"model": "sampler"'),
        "max_new_tokens": To(22, '"max_tokens": 22'),
        "format_check": To("<t>.*</t>(?P<answer>.*)", '"Tea.", "Tea."'),
        "engine_command": To("my vllm", {"program": ["my", "vllm"]}),
        "engine_arguments": To(["--mine"], {"arguments": ["--mine"]}),
        "engine_concurrency": To(31, lambda ends: ends.among("settings", '"concurrency": 31')),
    }  # fmt: skip


@starts("rankbuffer-compare", CompareConfig)
def two_policies_in_this_process(at) -> dict:
    at.ends.door("rankbuffer_tools.batch.engines.TransformersEngine._generate")
    rows = comparison(at) | base(models=[f"{name}={at.policy}" for name in "ab"], duels=3, max_new_tokens=4)
    sizes = lambda ends: {len(json.loads(each)) for each in ends.given["batch"]}  # noqa: E731
    rows["engine_batch_size"] = To(2, lambda ends: sizes(ends) == {2, 1})
    return rows | {"engine": To("transformers", lambda ends: ends.given["batch"])}


# Reports, and what makes a training set


@starts("rankbuffer-report", report_command.make_parser())
def report(at) -> dict:
    at.ends.door("rankbuffer_tools.report.command.Endpoint")
    at.ends.doors("rankbuffer_tools.report.report", "section_of advantage_chart")
    at.ends.door("rankbuffer_tools.report.report.write_charts", instead=lambda folder, charts: None)  # takes seconds
    at.ends.door("rankbuffer_tools.report.report.read_evaluations", instead=lambda paths: {})
    rows = {"step": 1, "text_limit": 77, "browser_mb": 0.5}
    rows |= {"judge_prompt_price": 2.0, "judge_completion_price": 4.0, "judge_cached_price": 0.5}
    rows |= {"output": To(str(at.out), "file index.html"), "evaluation": To(["mine"], {"paths": ["mine"]})}
    return rows | data(at, "numbers") | needed(run_dir=[at.run])


def of_command(name: str) -> Any:
    """Return the parser of a command of `rankbuffer-data`."""
    (action,) = (each for each in data_command.make_parser()._actions if each.dest == "command")
    return action.choices[name]


@starts("rankbuffer-data", of_command("check"))
def check(at) -> dict:
    at.ends.doors("rankbuffer_tools.data.command", "check_dataset load_queries")
    rows = {"k0": 5, "max_prompt_length": 333, "max_completion_length": 444, "free_tokens": 55, "sample": 9}
    return rows | needed(file=str(at.sets / "split")) | {
        "split": "test",
        "tokenizer": To(at.policy, at.policy),
        "no_guard": To(True, {"guard": False}),
        "no_responses": To(True, {"responses_needed": 0}),
        "method": To("listwise", {"most_shown": 6}),
        "num_generations": To(6, {"most_shown": 6}),
    }  # fmt: skip


@starts("rankbuffer-data", of_command("card"))
def card(at) -> dict:
    return {"file": To(str(at.sets / "mine.jsonl"), "36"), "repo_id": To("me/my-set", "my-set")}


@starts("recipes/generate_rubrics.py", RubricsConfig)
def rubrics(at) -> dict:
    at.ends.answer = lambda body: json.dumps({"rubrics": RUBRICS})
    rows = server(at) | data(at, "ranked") | sent(temperature=0.31, max_tokens=2222)
    rows["keep_apart"] = To(1, "file a_kept_apart.jsonl")
    return rows | {"output_file": To(str(at.out / "a.jsonl"), "file a.jsonl")}


@starts("recipes/generate_rubrics.py", RubricsConfig)
def generic_rubrics(at) -> dict:
    rows = data(at, "ranked") | base(output_file=str(at.out / "a.jsonl"))
    return rows | {"generic": To(True, GENERIC_RUBRICS[0].text)}


@starts("recipes/generate_rubrics.py", RubricsConfig)
def rubrics_of_a_dry_run(at) -> dict:
    rows = data(at, "ranked") | base(output_file=str(at.out / "a.jsonl"), generic=True)
    return rows | {"dry_run": To(True, "dry run: rubrics for 3 of 3")}


@starts("recipes/generate_responses.py", ResponsesConfig)
def responses_of_a_dry_run(at) -> dict:
    rows = base(output_file=str(at.out / "a.jsonl"), sampler_url=at.ends.url, sampler_model="sampler")
    return rows | data(at, "bare") | {"dry_run": To(True, "dry run: at most 21 responses")}


@starts("recipes/generate_responses.py", ResponsesConfig)
def responses(at) -> dict:
    answer = at.ends.answer
    # Three different responses of five: fewer than by default are enough.
    at.ends.answer = lambda body: f"Sample {body['seed'] // 1000 % 3}." if body["model"] == "sampler" else answer(body)
    at.ends.door("rankbuffer_trl.judge._servers.Servers.of")
    rows = judge(at) | data(at, "bare") | sent(temperature=0.31, top_p=0.32, max_tokens=2222)
    among = lambda name, value: To(value, lambda ends: plain(value) in ends.arrived(name))  # noqa: E731
    alike = {"judge_timeout": 77.0, "judge_prompt_price": 2.0, "judge_cached_price": 0.5}
    alike |= {"judge_free_tokens": 99, "judge_guard": False}
    rows |= {name: among(name, value) for name, value in alike.items()}  # the sampler has others
    return rows | needed(sampler_url=at.ends.url, least_responses=3) | {
        "output_file": To(str(at.out / "a.jsonl"), "file a.jsonl"),
        "sampler_model": To("sampler", '"model": "sampler"'),
        "sampler_api_key_env": To("SAMPLER_KEY", "Bearer sampler-k3y"),
        "sampler_request": To({"top_b": 8}, '"top_b": 8'),
        "sampler_timeout": To(555.0, lambda ends: "555.0" in ends.arrived("judge_timeout")),
        "responses": To(5, lambda ends: ends.asked.count('"model": "sampler"') == 3 * 5),
        "order_by": To("list", lambda ends: '"n": 6' not in ends.asked),
        "format_check": To("(?P<answer>.*)[.]", lambda ends: "Sample 1." not in ends.asked),
        "seed": To(7, '"seed": 4007'),
    }  # fmt: skip


@starts("recipes/generate_responses.py", ResponsesConfig)
def samples_for_an_audit(at) -> dict:
    at.ends.answer = lambda body: f"Sample {body['seed']}."
    rows = base(output_file=str(at.out / "a.jsonl"), sampler_url=at.ends.url, sampler_model="sampler")
    rows["audit_queries"] = To(2, lambda ends: ends.asked.count('"model": "sampler"') == 2 * 7)
    return rows | data(at, "ranked")


@starts("recipes/prepare_nectar.py", NectarConfig)
def nectar(at) -> dict:
    at.ends.door("rankbuffer_trl.data.load_queries")
    at.ends.door("rankbuffer_tools.data.nectar.sample_rows")
    counter = TokenCounter(at.policy)
    limit = sorted(counter.chat(to_row(raw_row(number, at.howto))["prompt"]) for number in range(9))[4]
    rows = data(at, "nectar") | {"streaming": True, "seed": 5, "queries": To(0, {"n": None})}
    rows["max_prompt_length"] = To(limit, f"the prompt has more than {limit} tokens")
    return rows | {
        "tokenizer": To(at.policy, f"tokens: {at.policy}"),
        "output_file": To(str(at.out / "a.jsonl"), "file a.jsonl"),
    }


@starts("recipes/prepare_nectar.py", NectarConfig)
def shuffled_nectar(at) -> dict:
    at.ends.door("rankbuffer_tools.data.nectar.sample_rows")
    return data(at, "nectar") | base(output_file=str(at.out / "a.jsonl")) | {"shuffle": To(True, {"seed": None})}


# Evaluations


def evaluation(at, *benchmarks: str) -> dict:
    """The rows of all starts of an evaluation."""
    at.ends.door("evaluation.results.EvaluationReport")
    at.ends.door("rankbuffer_tools.batch.engines.seed_of")
    rows = needed(assets_dir=str(at.tmp / "assets"), assets_manifest=str(build(at.tmp / "assets")))
    return rows | sent(temperature=0.31, top_p=0.32, top_k=17, chat_template_kwargs={"enable_thinking": False}) | {
        "benchmarks": To([*benchmarks], f"/{benchmarks[0]}/"),
        "output_dir": To(str(at.out), "file mine/"),
        "limit": To(2, '"meaningless": true'),
        "max_new_tokens": To(22, '"max_tokens": 22'),
        "format_check": To("(?P<answer>.*)", '"format_check": "(?P<answer>.*)"'),
        "seed": 5,
    }  # fmt: skip


def answer_of_benchmarks(body: dict) -> str:
    """Answer as model or as judge. The judge fails at half of WildBench: more than by default is allowed."""
    if body["model"].startswith("sampler"):
        return text_of(body["messages"][-1]["content"])
    return "I cannot say." if "<Q>More 0<" in str(body) else verdict(body["messages"])


@starts("evaluation.run", EvaluationConfig)
def evaluation_by_a_server(at) -> dict:
    at.ends.answer = answer_of_benchmarks
    rows = server(at) | evaluation(at, "arena_hard", "wildbench")
    return rows | needed(judge_max_failures=0.75, engine_url=at.ends.url) | {
        "judge_completion_price": To(4.0, '"price": 0.'),
        "judge_max_attempts": To(5, lambda ends: ends.given["max_attempts"] == {"1", "5"}),  # a pilot asks once
        "models": To([f"mine={at.policy}"], "file mine/"),
        "engine_model": To("sampler", '"model": "sampler"'),
        "engine_concurrency": To(31, lambda ends: ends.among("settings", '"concurrency": 31')),
        "wildbench_reward": To(True, "choice"),
        "paper_rows": To(["ArenaRL"], {"paper": ["ArenaRL"]}),
    }  # fmt: skip


@starts("evaluation.run", EvaluationConfig)
def evaluation_by_a_command(at) -> dict:
    at.ends.answer = answer_of_benchmarks
    started = contextmanager(lambda *args: (yield at.ends.url))
    at.ends.door("rankbuffer_tools.batch.engines.vllm_server", instead=started)
    rows = base(**{name: value_of(row) for name, row in evaluation(at, "writingbench").items()})
    models = [f"{name}={at.policy}" for name in ("sampler", "sampler-2")]
    rows |= base(judge_url=[at.ends.url], judge_model="mine", models=models)
    rows |= {"engine_command": To("my vllm", {"program": ["my", "vllm"]}), "compare_with": "sampler-2"}
    return rows | {"engine_arguments": To(["--mine"], {"arguments": ["--mine"]})}


@starts("evaluation.run", EvaluationConfig)
def evaluation_in_this_process(at) -> dict:
    at.ends.door("rankbuffer_tools.batch.engines.TransformersEngine._generate")
    at.ends.door("transformers.GenerationMixin.generate")
    rows = evaluation(at, "writingbench") | base(models=[f"mine={at.policy}"], limit=3)
    rows |= base(chat_template_kwargs={"enable_thinking": False}) | needed(engine="transformers")
    for name in ("temperature", "top_p", "top_k", "max_new_tokens"):
        part = f'"{name}": {plain(rows[name].value)}'
        rows[name] = To(rows[name].value, lambda ends, part=part: ends.among("kwargs", part))
    sizes = lambda ends: {len(json.loads(each)) for each in ends.given["batch"]}  # noqa: E731
    rows["engine_batch_size"] = To(2, lambda ends: sizes(ends) == {2, 1})
    return rows | {"generate_only": To(True, lambda ends: not ends.asked)}


# Rewards for a stock trainer, and for other programs


def group_of(at) -> tuple[dict, list[str]]:
    """Return the row of a query and texts with a thought."""
    return at.howto[0], [f"<think>a plan</think>{text}" for text in at.howto[1]["responses"]]


def reward(at) -> dict:
    """The rows of rewards for other programs."""
    of_judge = JudgeConfig(**{name: value_of(row) for name, row in judge(at).items()}).judge()
    rows = {"judge": To(of_judge, '"model": "mine"'), "max_failures": 0.75, "step_timeout": 88.0}
    return rows | {"store": To(at.out / "live.sqlite", {"path": at.out / "live.sqlite"})}


def ask_reward(at, values: dict) -> None:
    reward, (row, texts) = RankBufferReward(**values), group_of(at)
    at.ends.lines += [f"eval of {id}" for id in getattr(reward._eval_queries, "ids", [])]
    try:
        assert len(reward([row["prompt"]] * 3, texts[:3], [row["query_id"]] * 3)) == 3
    finally:
        reward.close()


@starts("RankBufferReward", RankBufferReward, ask_reward)
def stock_reward(at) -> dict:
    at.ends.doors("rankbuffer_trl.training._reward_function", "GroupScorer BufferStore GroupSettings")
    args = SimpleNamespace(num_generations=3, num_generations_eval=5, metric_for_best_model=None)
    return reward(at) | needed(num_generations=3) | {
        "num_generations_eval": 5,
        "dataset": To(Dataset.from_list(at.howto), at.howto[0]["prompt"][0]["content"]),
        "method": To(RankBuffer(k0=3), {"method.k0": 3}),
        "answers": To(AnswerExtractor("think"), lambda ends: "a plan" not in ends.asked),
        "eval_dataset": To(Dataset.from_list([at.howto[0] | {"query_id": "other"}]), "eval of other"),
        "args": To(args, {"num_generations": 3}),
    }  # fmt: skip


def rank_a_group(at, values: dict) -> None:
    async def play() -> None:
        async with GroupRanker(**values) as ranker:
            await ranker.rank(*group_of(at))

    asyncio.run(play())


@starts("GroupRanker", GroupRanker, rank_a_group)
def group_ranker(at) -> dict:
    at.ends.doors("rankbuffer_trl._group_ranker", "Scoring BufferStore load_method")
    rows = reward(at) | listwise() | {"seed": 10}
    return rows | {"format_check": To("think", lambda ends: "a plan" not in ends.asked)}


# Training


HANDED = {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "hub_private_repo"}
HANDED |= {"model_name_or_path", "model_revision", "attn_implementation", "dtype", "use_peft"}  # TRL's, passed on
TRAIN = {name: default for group in SETTINGS_GROUPS for name, default in settings_of(group).items()}
TRAIN = {name: default for name, default in TRAIN.items() if name in RANKBUFFER_FIELDS | JUDGE_FIELDS | HANDED}
run_training = partial(run_program, "rankbuffer-train", TRAIN)


def training(at) -> dict:
    """The rows of all starts of a training that is small."""
    small = base(model_name_or_path=at.policy, num_generations=4, per_device_train_batch_size=8, max_steps=2)
    small |= base(use_cpu=True, bf16=False, report_to="none", max_completion_length=16, save_steps=1)
    return small | data(at) | base(output_dir=str(at.out))


@starts("rankbuffer-train", TRAIN, run_training)
def preflight(at) -> dict:
    return training(at) | judge(at) | base(push_to_hub=True, hub_token="a-token") | {
        "judge_price_budget": To(1e-3, "[preflight] the budget ends at about step 1 of 2"),
        "hub_private_repo": To(False, "public: everybody can read it"),
        "preflight_only": To(True, "[preflight] sample: "),
        "recipe_queries_per_step": To(5, "the recipe is for 5: "),
        "num_processes": To(2, "processes: 2, planned for"),
    }  # fmt: skip


@starts("rankbuffer-train", TRAIN, run_training)
def dry_run(at) -> dict:
    budget = To(1000, "[dry run] the budget ends at about step 1 of 2")
    return training(at) | {"judge_token_budget": budget, "dry_run": To(True, "--preflight_only asks the judge")}


@starts("rankbuffer-train", TRAIN, partial(run_training, fails=True))
def dry_run_without_data(at) -> dict:
    rows = training(at) | base(dry_run=True, dataset_name="no.jsonl", dataset_config=None, dataset_train_split="train")
    return rows | {"dry_run_queries": To(77, "dry_run_queries=77")}


@starts("rankbuffer-train", TRAIN, partial(run_training, fails=True))
def a_long_prompt(at) -> dict:
    return training(at) | {"max_prompt_length": To(3, "tokens, max_prompt_length is 3")}


@starts("rankbuffer-train", TRAIN, run_training)
def a_short_context(at) -> dict:
    at.ends.door("rankbuffer_trl.rewards._rankbuffer.RankBuffer.with_room_for")
    return training(at) | base(dry_run=True) | {"judge_context": To(9000, {"anchors": 387})}


def train_and_resume(at, values: dict) -> None:
    def close(trainer) -> None:
        weights = zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
        at.ends.lines.append(f"{dict(weights)} {trainer.args.model_init_kwargs}")
        closes(trainer)

    closes = RankBufferTrainer.close
    at.ends.patch.setattr(RankBufferTrainer, "close", close)
    run_training(at, values | {"max_steps": 1})
    run_training(at, values | {"resume_from_checkpoint": "true"})


@starts("rankbuffer-train", TRAIN, train_and_resume)
def a_run(at) -> dict:
    names = "_scorer.GroupScorer _scorer.Debiasing _state.GroupReward.begin _reward_function.step_metrics"
    at.ends.doors("rankbuffer_trl.training", f"{names} _trainer.AnswerExtractor _trainer.scale_by_signal")
    at.ends.doors("rankbuffer_trl.checkpointing", "_trainer.check_trusted _checkpoint.Checkpoints.resumable")
    at.ends.door("rankbuffer_tools.train.command.RankBufferTrainer")
    function = {"function": "trl.rewards.think_format_reward", "weight": 0.25}
    own = {name: value_of(row) for name, row in judge(at).items() if not name.endswith("_price")}
    rows = training(at) | judge(at) | needed(dataset_test_split="seen")
    rows |= base(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, scale_rewards="none")
    return rows | {"judge_max_failures": 0.75, "judge_step_timeout": To(88.0, {"step_timeout": 88.0})} | {
        "method": To("listwise", lambda ends: '"Listwise"' in ends.given["method"]),
        "method_args": To({"passes": 4}, {"method.passes": 4}),
        "scale_by_signal": To(True, lambda ends: ends.given["weights"]),
        "reference_judge": To(own | {"judge_model": "other"}, '"model": "other"'),
        "judge_prompt_price": To(2.0, lambda ends: "2.0" in ends.arrived("judge_prompt_price")),  # of the judge alone
        "judge_cached_price": To(0.5, lambda ends: "0.5" in ends.arrived("judge_cached_price")),
        "reference_groups": To(1, {"first": 1}),
        "judge_during_generation": To(False, lambda ends: not ends.given["training"]),
        "format_check": To("(?s)(?P<answer>.+)", {"check": "(?s)(?P<answer>.+)"}),
        "format_weight": To(0.5, "'format_reward': 0.5"),
        "reward_functions": To([function], "'think_format_reward': 0.25"),
        "resume_with_changes": To(True, {"with_changes": True}),
        "trust_checkpoint": To(True, {"trusted": True}),
        "model_name_or_path": To(at.policy, lambda ends: plain(at.policy) in ends.given["model"]),
        "model_revision": To("mine", "'revision': 'mine'"),
        "attn_implementation": To("eager", "'attn_implementation': 'eager'"),
        "dtype": To("bfloat16", "'dtype': 'bfloat16'"),
        "use_peft": To(True, lambda ends: ends.among("kwargs", '"peft_config": "LoraConfig"')),
    }  # fmt: skip


def use_library(at, values: dict) -> None:
    """Make a trainer with a tool, and one whose rollouts come from a server."""

    def tell_time(place: str) -> str:
        """Tell the time.

        Args:
            place: The place.
        """
        return place

    args, tokenizer = RankBufferConfig(**values), AutoTokenizer.from_pretrained(at.policy)
    tokenizer.chat_template = of_trl("qwen3")
    others = {"tools": [tell_time], "processing_class": tokenizer}
    RankBufferTrainer(at.policy, args, Dataset.from_list(at.howto), **others).close()
    absent = dict.fromkeys(("tools", "rollout_func", "environment_factories"))
    separate_rollouts(MagicMock(**absent, vllm_mode="server", args=args), print)


@starts("rankbuffer-train", TRAIN, use_library)
def the_library(at) -> dict:
    at.ends.door("rankbuffer_trl.training._trainer.AnswerExtractor")
    at.ends.door("rankbuffer_trl.training._rollouts.SeparateRollouts", instead=lambda *args: None)
    absent = {"model_name_or_path", *data(at)}
    rows = {name: row for name, row in training(at).items() if name not in absent}
    rows |= {"judge_view": To("transcript", {"view": "transcript"}), "judge_view_limit": To(77, {"limit": 77})}
    return rows | {"rollout_timeout": To(66.0, {"timeout": 66.0})}


# The tests


MARKS = {"a_run": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in STARTS])
def test_each_setting_arrives(name, at, capsys):
    program, owner, make, play = STARTS[name]
    rows = make(at)
    (play or partial(run_program, program, owner))(at, {setting: value_of(row) for setting, row in rows.items()})
    at.ends.lines.append(capsys.readouterr().out)
    at.ends.add_files(at.out)
    assert not [*at.ends.unseen(rows)]


def test_each_setting_has_a_row(at):
    owners, seen = defaultdict(dict), defaultdict(dict)
    for program, owner, make, _ in STARTS.values():
        owners[program] |= settings_of(owner)
        seen[program] |= {n: value_of(row) for n, row in make(at).items() if not isinstance(row, To) or row.end}
    for program, known in owners.items():
        assert seen[program].keys() == known.keys() - CLIENT, program
        assert not [name for name, value in seen[program].items() if value == known[name]], f"defaults of {program}"
    assert owners.keys() >= PROGRAMS.keys() - {"recipes/train_rankbuffer.py"}, "a program has no start here"


@dataclass
class Own(RubricJudge):
    """A client of one's own."""

    word: str = ""


LEAST = {
    AuditConfig: {"dataset_name": "a.jsonl", "samples": "a.jsonl"},
    CompareConfig: {"run_dir": "a", "dataset_name": "a.jsonl"},
    RubricsConfig: {"dataset_name": "a.jsonl"},
    ResponsesConfig: {"dataset_name": "a.jsonl", "sampler_url": "http://a", "sampler_model": "a"},
    RankBufferConfig: {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"},
}


def test_a_judge_may_be_a_client_of_ones_own():
    owners = {each for _, each, *_ in STARTS.values() if isinstance(each, type) and settings_of(each).keys() >= CLIENT}
    assert LEAST.keys() == owners | {RankBufferConfig}
    for owner, least in LEAST.items():
        config = owner(**least, judge_client=f"{__name__}.Own", judge_client_args={"word": "x"})
        assert config.judge().client == Own("x"), owner
