"""Each setting of each program reaches its other end, and a new one without a row here fails."""

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from datasets import Dataset
from helpers.evaluation_assets import build, text_of, verdict
from helpers.nectar_rows import RUBRICS, raw_row
from helpers.programs import start
from helpers.wiring import Ends, To, plain, settings_of
from test_commands import PROGRAMS
from test_format import of_trl

from evaluation.config import EvaluationConfig
from rankbuffer_tools.audit.command import AuditConfig
from rankbuffer_tools.data import command as data_command
from rankbuffer_tools.data.nectar import to_row
from rankbuffer_tools.jobs.output import write_rows
from rankbuffer_tools.rejudge.config import RejudgeConfig
from rankbuffer_tools.report import command as report_command
from rankbuffer_tools.service.async_grpo import AsyncRankBufferReward
from rankbuffer_tools.service.command import ServeConfig
from rankbuffer_tools.train.parser import JUDGE, OURS, TRAINING
from rankbuffer_trl.data.queries import GENERIC
from rankbuffer_trl.data.tokens import TokenCounter
from rankbuffer_trl.judge import RubricJudge
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.servers import Servers
from rankbuffer_trl.rewards.format import AnswerReader
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.config import RankBufferConfig
from rankbuffer_trl.training.reward_function import RankBufferReward
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
    sets.mkdir()
    which = {"prompt": "Which?", "rubrics": [{"text": "Is high.", "weight": 1}], "responses": [*"1234"]}
    files = {
        "mine": howto,
        "bare": [{"query_id": row["query_id"], "prompt": row["prompt"]} for row in howto[:3]],
        "ranked": [{key: row[key] for key in ("query_id", "prompt", "responses")} for row in howto[:3]],
        "numbers": [which | {"query_id": f"q{i}"} for i in range(4)],
        "nectar": [raw_row(number, howto) for number in range(9)],
    }
    for name, rows in files.items():
        write_rows(sets / f"{name}.jsonl", rows)
    (sets / "split").mkdir()
    write_rows(sets / "split" / "test.jsonl", howto)
    splits = ("held", "seen")
    parts = [{"config_name": n, "data_files": [{"split": s, "path": f"{n}.jsonl"} for s in splits]} for n in files]
    (sets / "README.md").write_text(f"---\nconfigs: {json.dumps(parts)}\n---\n")
    of_servers = lambda given: isinstance(given["client"], Servers)  # noqa: E731
    ends.door("rankbuffer_trl.judge.judge.Judge.__init__", when=of_servers)
    ends.door("rankbuffer_trl.judge.servers.Servers.__init__")
    ends.door("rankbuffer_trl.judge.openai_client.OpenAIClient.__init__")
    with ends.serving():
        yield SimpleNamespace(
            ends=ends, tmp=tmp_path, out=tmp_path / "out", sets=sets, run=run.path, howto=howto, policy=tiny_policy
        )


def data(at, config: str = "mine") -> dict:
    """The settings of a data set that can be loaded by all three together alone."""
    told = {"dataset_name": str(at.sets), "dataset_config": config, "dataset_train_split": "held"}
    return {name: To(value, True) for name, value in told.items()}


def judge(at, *without: str) -> dict:
    """The settings of a judge. `judge_max_failures` has a row where it is used."""
    rows = {
        "judge_url": To([at.ends.url], "POST "),
        "judge_model": To("mine", '"model": "mine"'),
        "judge_api_key_env": To("JUDGE_KEY", "Bearer judge-k3y"),
        "judge_request": To({"top_a": 7}, '"top_a": 7'),
        "judge_headers": To({"X-Run": "7"}, '"X-Run": "7"'),
        "judge_timeout": To(77.0, {"endpoint.timeout": 77.0}),
        "judge_wait": To(66.0, {"wait": 66.0, "endpoint.wait": 66.0}),
        "judge_max_retries": To(2, {"endpoint.max_retries": 2}),
        "judge_max_attempts": To(5, {"max_attempts": 5}),
        "judge_concurrency": To(9, {"endpoint.concurrency": 9}),
        "judge_prompt_price": To(2.0, {"endpoint.prompt_price": 2.0}),
        "judge_cached_price": To(0.5, {"endpoint.cached_price": 0.5}),
        "judge_completion_price": To(4.0, {"endpoint.completion_price": 4.0}),
        "judge_decoding": To("json_schema", '"response_format"'),
        "judge_free_tokens": To(99, {"free_tokens": 99}),
        "judge_guard": To(False, {"guard": False}),
        "judge_samples": To(6, {"samples": 6}),
    }
    return {name: row for name, row in rows.items() if name not in without}


def value_of(row: Any) -> Any:
    return row.value if isinstance(row, To) else row


def run_program(program: str, owner: Any, at, values: dict, fails: bool = False) -> None:
    """Start a program with settings, from a file if it reads one. The line with which it fails is noted."""
    (at.tmp / "all.yaml").write_text(json.dumps(values))  # which is YAML, too
    words = ["--config", str(at.tmp / "all.yaml")]
    if hasattr(owner, "_actions"):
        words = owner.prog.split()[1:]
        for action in owner._actions:
            if action.dest in values:
                value = values[action.dest]
                words += action.option_strings[:1]
                words += (
                    [] if value is True else [str(each) for each in (value if isinstance(value, list) else [value])]
                )
    try:
        start(program, words)
    except SystemExit as end:
        assert bool(end.code) == fails, end.code
        at.ends.lines.append(str(end.code))


def priced(at, *without: str) -> dict:
    """The settings of a judge whose costs are printed."""
    return judge(at, *without) | {"judge_completion_price": To(4.0, "at the prices given")}


@starts("rankbuffer-audit", AuditConfig)
def audit(at) -> dict:
    for name in ("ask_everything", "fit_judge", "lasting_bound", "advise", "Audit"):
        at.ends.door(f"rankbuffer_tools.audit.command.{name}")
    all_pairs = lambda path, pairs: [(id, *pair) for id, each in pairs.items() for pair in each]  # noqa: E731
    at.ends.door("rankbuffer_tools.audit.command.read_labels", instead=all_pairs)
    at.ends.patch.setattr("rankbuffer_tools.audit.fit.LABELS", 9)
    samples = [
        {"query_id": row["query_id"], "responses": [f"{t} Indeed." for t in row["responses"]]} for row in at.howto
    ]
    write_rows(at.tmp / "samples.jsonl", samples)
    return priced(at) | data(at) | {
        "judge_max_failures": To(0.75, {"max_failures": 0.75}),
        "judge_samples": To(6, lambda ends: "6" in ends.given["samples"]),
        "samples": To(str(at.tmp / "samples.jsonl"), "Indeed."),
        "queries": To(6, "[price] 6 queries: "),
        "labels": To("mine.jsonl", {"path": "mine.jsonl"}),
        "probabilities": To(False, {"soft": False}),
        "price_budget": To(9.0, {"budget": 9.0, "in_price": True}),
        "epochs": To(3, {"costs.groups": 3 * 36}),
        "output_dir": To(str(at.out), "file audit.json"),
        "seed": 5,
    }  # fmt: skip


@starts("rankbuffer-audit", AuditConfig)
def audit_of_a_card(at) -> dict:
    at.ends.door("rankbuffer_tools.audit.command.advise")
    rows = {"queries": To(6), "output_dir": To(str(at.out)), "budget": 5e6, "probabilities": To(False)}
    return rows | {"card": To("My-judge", "My-judge")}


def rejudge(at, mode: str, said: str | None, failures: Any = None) -> dict:
    """The rows of all modes."""
    return priced(at) | data(at, "numbers") | {
        "mode": To(mode, said),
        "run_dir": To(str(at.run), True),
        "output": To(str(at.out / "mine.json"), "file mine.json"),
        "judge_max_failures": failures,
        "seed": 5,
    }  # fmt: skip


@starts("rankbuffer-rejudge", RejudgeConfig)
def replay(at) -> dict:
    for name in ("replay", "read_visits", "measure"):
        at.ends.door(f"rankbuffer_tools.rejudge.command.{name}")
    at.ends.door("rankbuffer_tools.rejudge.config.load_method")
    return rejudge(at, "replay", None, To(0.75, {"max_failures": 0.75})) | {
        "sample": 3,
        "epochs": 2,
        "method": To("listwise", {"name": "listwise"}),
        "method_args": To({"looks": 4}, {"arguments": {"looks": 4}}),
    }


@starts("rankbuffer-rejudge", RejudgeConfig)
def duel(at) -> dict:
    for name in ("draw", "check_failures"):
        at.ends.door(f"rankbuffer_tools.rejudge.command.{name}")
    rows = rejudge(at, "duel", "[price] 3 duels", To(0.75, {"most": 0.75}))
    return rows | {"duels": 3, "control": 2, "probabilities": To(True, '"n": 6')}


@starts("rankbuffer-rejudge", RejudgeConfig)
def watch(at) -> dict:
    for name in ("next_pairs", "check_failures"):
        at.ends.door(f"rankbuffer_tools.rejudge.watch.{name}")
    own = {name: value_of(row) for name, row in judge(at).items()}
    left, answer = [None] * 10, at.ends.answer  # both questions of the first pair fail
    at.ends.answer = lambda body: "no" if left and (left.pop(), True) else answer(body)
    rows = rejudge(at, "watch", "[watch] step", To(1.0, {"most": 1.0}))
    return rows | {
        "reader": To(own | {"judge_model": "other", "judge_max_failures": 1.0}, '"model": "other"'),
        "reader_rubrics": To(False, GENERIC[0].text),
        "reader_share": To(0.5, {"share": 0.5}),
        "tolerance": To(0.2, {"begun.tolerance": 0.2}),
        "false_alarm_rate": To(0.04, {"begun.false_alarm_rate": 0.04}),
        "probabilities": To(True, '"n": 6'),
        "seed": To(5, {"begun.seed": 5}),
    }


@starts("rankbuffer-rejudge", RejudgeConfig)
def dry(at) -> dict:
    rows = {name: To(value_of(row)) for name, row in rejudge(at, "duel", None, 0.75).items()}
    return rows | {"dry_run": To(True, lambda ends: not ends.asked)}


@starts("rankbuffer-report", report_command.make_parser())
def report(at) -> dict:
    at.ends.door("rankbuffer_tools.report.command.Endpoint")
    for name in ("section_of", "advantage_chart"):
        at.ends.door(f"rankbuffer_tools.report.report.{name}")
    at.ends.door(
        "rankbuffer_tools.report.report.write_charts", instead=lambda folder, charts: None
    )  # it takes seconds
    at.ends.door("rankbuffer_tools.report.report.read_evaluations", instead=lambda paths: {})
    return data(at, "numbers") | {
        "run_dir": To([str(at.run)], True),
        "output": To(str(at.out), "file index.html"),
        "step": 1,
        "evaluation": To(["mine"], {"paths": ["mine"]}),
        "text_limit": 77,
        "browser_mb": 0.5,
        "judge_prompt_price": To(2.0, {"prompt_price": 2.0}),
        "judge_completion_price": To(4.0, {"completion_price": 4.0}),
    }  # fmt: skip


def of_command(name: str) -> Any:
    """Return the parser of a command of `rankbuffer-data`."""
    (action,) = (each for each in data_command.make_parser()._actions if each.dest == "command")
    return action.choices[name]


@starts("rankbuffer-data", of_command("check"))
def check(at) -> dict:
    at.ends.door("rankbuffer_tools.data.command.check_dataset")
    at.ends.door("rankbuffer_tools.data.command.load_queries")
    return {
        "file": To(str(at.sets / "split"), True),
        "split": To("test", {"split": "test"}),
        "tokenizer": To(at.policy, at.policy),
        "no_guard": To(True, {"settings.guard": False}),
        "no_responses": To(True, {"settings.responses_needed": False}),
        "k0": To(5, {"settings.k0": 5}),
        "max_prompt_length": To(333, {"settings.max_prompt_length": 333}),
        "max_completion_length": To(444, {"settings.max_completion_length": 444}),
        "free_tokens": To(55, {"settings.free_tokens": 55}),
        "sample": To(9, {"settings.sample": 9}),
        "method": To("listwise", {"settings.most_shown": 6}),
        "num_generations": To(6, {"settings.most_shown": 6}),
    }


@starts("rankbuffer-data", of_command("card"))
def card(at) -> dict:
    return {"file": To(str(at.sets / "mine.jsonl"), "36"), "repo_id": To("me/my-set", "my-set")}


@starts("recipes/generate_rubrics.py", RubricsConfig)
def rubrics(at) -> dict:
    at.ends.answer = lambda body: json.dumps({"rubrics": RUBRICS})
    verdicts = ("judge_decoding", "judge_free_tokens", "judge_guard", "judge_samples")
    return priced(at, *verdicts) | data(at, "ranked") | {
        "judge_completion_price": To(4.0, "; 0."),
        "output_file": To(str(at.out / "a.jsonl"), "file a.jsonl"),
        "temperature": To(0.31, '"temperature": 0.31'),
        "max_tokens": To(2222, '"max_tokens": 2222'),
    }  # fmt: skip


@starts("recipes/generate_rubrics.py", RubricsConfig)
def generic_rubrics(at) -> dict:
    return {name: To(row.value) for name, row in data(at, "ranked").items()} | {
        "output_file": To(str(at.out / "a.jsonl")),
        "generic": To(True, GENERIC[0].text),
    }


@starts("recipes/generate_responses.py", ResponsesConfig)
def responses(at) -> dict:
    answer = at.ends.answer
    # Three different responses of five: fewer than by default are enough.
    at.ends.answer = lambda body: f"Sample {body['seed'] // 1000 % 3}." if body["model"] == "sampler" else answer(body)
    shared = ("timeout", "max_retries", "concurrency", "prompt_price", "completion_price")
    rows = judge(at) | {
        f"judge_{name}": To(
            row.value, lambda ends, name=name, row=row: plain(row.value) in ends.given[f"endpoint.{name}"]
        )
        for name, row in ((name, judge(at)[f"judge_{name}"]) for name in shared)
    }
    return rows | data(at, "bare") | {
        "judge_guard": To(False, lambda ends: "false" in ends.given["guard"]),
        "judge_free_tokens": To(99, lambda ends: "99" in ends.given["free_tokens"]),
        "judge_samples": To(6, lambda ends: "6" in ends.given["samples"]),
        "judge_completion_price": To(4.0, "; 0."),
        "output_file": To(str(at.out / "a.jsonl"), "file a.jsonl"),
        "sampler_url": To(at.ends.url, True),
        "sampler_model": To("sampler", '"model": "sampler"'),
        "sampler_api_key_env": To("SAMPLER_KEY", "Bearer sampler-k3y"),
        "sampler_request": To({"top_b": 8}, '"top_b": 8'),
        "sampler_timeout": To(555.0, lambda ends: "555.0" in ends.given["endpoint.timeout"]),
        "responses": To(5, lambda ends: ends.asked.count('"model": "sampler"') == 3 * 5),
        "least_responses": To(3, True),
        "temperature": To(0.31, '"temperature": 0.31'),
        "top_p": To(0.32, '"top_p": 0.32'),
        "max_tokens": To(2222, '"max_tokens": 2222'),
        "seed": To(7, '"seed": 4007'),
    }  # fmt: skip


@starts("recipes/generate_responses.py", ResponsesConfig)
def samples_for_an_audit(at) -> dict:
    at.ends.answer = lambda body: f"Sample {body['seed']}."
    return {name: To(row.value) for name, row in data(at, "ranked").items()} | {
        "output_file": To(str(at.out / "a.jsonl")),
        "sampler_url": To(at.ends.url),
        "sampler_model": To("sampler"),
        "audit_queries": To(2, lambda ends: ends.asked.count('"model": "sampler"') == 2 * 7),
    }


@starts("recipes/prepare_nectar.py", NectarConfig)
def nectar(at) -> dict:
    at.ends.door("rankbuffer_trl.data.queries.load_queries")
    at.ends.door("rankbuffer_tools.data.nectar.sample")
    counter = TokenCounter(at.policy)
    limit = sorted(counter.chat(to_row(raw_row(number, at.howto))["prompt"]) for number in range(9))[4]
    return data(at, "nectar") | {
        "streaming": True,
        "queries": To(0, {"n": None}),
        "seed": 5,
        "tokenizer": To(at.policy, "tokens: "),
        "max_prompt_length": To(limit, f"the prompt has more than {limit} tokens"),
        "output_file": To(str(at.out / "a.jsonl"), "file a.jsonl"),
    }


@starts("recipes/prepare_nectar.py", NectarConfig)
def shuffled_nectar(at) -> dict:
    at.ends.door("rankbuffer_tools.data.nectar.sample")
    rows = {name: To(row.value) for name, row in data(at, "nectar").items()}
    return rows | {"output_file": To(str(at.out / "a.jsonl")), "shuffle": To(True, {"seed": None})}


def evaluation(at, *benchmarks: str) -> dict:
    """The rows of all starts of an evaluation."""
    for name in ("results.EvaluationReport", "engines.seed_of"):
        at.ends.door(f"evaluation.{name}")
    manifest = build(at.tmp / "assets")
    return {
        "benchmarks": To([*benchmarks], f"/{benchmarks[0]}/"),
        "assets_dir": To(str(at.tmp / "assets"), True),
        "assets_manifest": To(str(manifest), True),
        "output_dir": To(str(at.out), "file mine/"),
        "limit": To(2, '"meaningless": true'),
        "chat_template_kwargs": To({"enable_thinking": False}, '"chat_template_kwargs": {"enable_thinking": false}'),
        "seed": 5,
        "temperature": To(0.31, '"temperature": 0.31'),
        "top_p": To(0.32, '"top_p": 0.32'),
        "top_k": To(17, '"top_k": 17'),
        "max_new_tokens": To(22, '"max_tokens": 22'),
    }


def answer_of_benchmarks(body: dict) -> str:
    """Answer as model or as judge. The judge fails half of the battles: more than by default are allowed."""
    prompt = body["messages"][-1]["content"]
    if body["model"].startswith("sampler"):
        return text_of(prompt)
    return (
        "I cannot say."
        if "<Q>Question" in str(body) and ("Question 0 " in str(body) or "Question 8 " in str(body))
        else verdict(body["messages"])
    )


@starts("evaluation.run", EvaluationConfig)
def evaluation_by_a_server(at) -> dict:
    at.ends.answer = answer_of_benchmarks
    verdicts = ("judge_decoding", "judge_free_tokens", "judge_guard", "judge_samples")
    return judge(at, *verdicts) | evaluation(at, "arena_hard", "wildbench") | {
        "judge_max_attempts": To(5, lambda ends: "5" in ends.given["max_attempts"]),  # the engine's has another
        "judge_completion_price": To(4.0, '"price": 0.'),
        "judge_max_failures": To(0.75, True),
        "models": To([f"mine={at.policy}"], "file mine/"),
        "engine_url": To(at.ends.url, True),
        "engine_model": To("sampler", '"model": "sampler"'),
        "engine_concurrency": To(31, lambda ends: ends.among("settings", '"concurrency": 31')),
        "wildbench_reward": To(True, "choice"),
        "paper_rows": To(["ArenaRL"], "paper: ArenaRL"),
    }  # fmt: skip


@starts("evaluation.run", EvaluationConfig)
def evaluation_by_a_command(at) -> dict:
    at.ends.answer = answer_of_benchmarks
    at.ends.door("evaluation.generate.vllm_server", instead=contextmanager(lambda *args: (yield at.ends.url)))
    rows = {name: To(value_of(row)) for name, row in evaluation(at, "writingbench").items()}
    return rows | {
        "judge_url": To([at.ends.url]),
        "judge_model": To("mine"),
        "models": To([f"{name}={at.policy}" for name in ("sampler", "sampler-2")]),
        "engine_command": To("my vllm", {"program": ["my", "vllm"]}),
        "engine_arguments": To(["--mine"], {"arguments": ["--mine"]}),
        "compare_with": "sampler-2",
    }


@starts("evaluation.run", EvaluationConfig)
def evaluation_in_this_process(at) -> dict:
    at.ends.door("evaluation.engines.TransformersEngine._generate")
    at.ends.door("transformers.GenerationMixin.generate")
    return evaluation(at, "writingbench") | {
        "models": To([f"mine={at.policy}"]),
        "limit": To(3),
        "engine": To("transformers", True),
        "generate_only": To(True, lambda ends: not ends.asked),
        "engine_batch_size": To(2, lambda ends: {len(json.loads(each)) for each in ends.given["batch"]} == {2, 1}),
        "chat_template_kwargs": To({"enable_thinking": False}),
        "temperature": To(0.31, lambda ends: ends.among("kwargs", '"temperature": 0.31')),
        "top_p": To(0.32, lambda ends: ends.among("kwargs", '"top_p": 0.32')),
        "top_k": To(17, lambda ends: ends.among("kwargs", '"top_k": 17')),
        "max_new_tokens": To(22, lambda ends: ends.among("kwargs", '"max_new_tokens": 22')),
    }


def serve(at, *words: str) -> dict:
    """The rows of all starts of the service. A port is free now."""
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    at.ends.door("rankbuffer_tools.service.command.SingleGroups")
    at.ends.door("rankbuffer_tools.service.command.load_method")
    return judge(at) | data(at) | {
        "judge_max_failures": To(0.75, {"max_failures": 0.75}),
        "judge_step_timeout": To(88.0, {"timeout": 88.0}),
        "judge_samples": To(6, {"samples": 6}),
        "judge_token_budget": To(10**9),
        "judge_price_budget": To(1e9),
        "method": To("listwise", {"name": "listwise"}),
        "method_args": To({"looks": 4}, {"arguments": {"looks": 4}}),
        "seed": 10,
        "format_check": To("think", lambda ends: "a plan" not in ends.asked),
        "output_dir": To(str(at.out), "file _rankbuffer/live.sqlite"),
        "host": To("127.0.0.2", True),
        "port": To(port, True),
        "token_env": To("OWN_KEY", True),
    }  # fmt: skip


def serve_a_group(at, values: dict, end: Callable = lambda: os.kill(os.getpid(), signal.SIGINT)) -> None:
    """Serve in this thread. Another one posts a group, without its token, with another one and with it, and ends."""
    at.ends.patch.setattr("os._exit", sys.exit)

    def post() -> list[int]:
        texts = [f"<think>a plan</think>{text}" for text in at.howto[1]["responses"]]
        group = {"query_id": at.howto[0]["query_id"], "texts": texts}
        with httpx.Client(base_url=f"http://{values['host']}:{values['port']}", timeout=60) as client:
            while True:
                try:
                    client.get("/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.01)
            tokens = ("none", "another", "own-k3y")
            heads = [{"Authorization": f"Bearer {token}"} for token in tokens]
            found = [client.post("/v1/groups", json=group, headers=head).status_code for head in heads]
        end()
        return found

    with ThreadPoolExecutor(1) as pool:
        posts = pool.submit(post)
        run_program("rankbuffer-serve", ServeConfig, at, values)
        assert posts.result() == [401, 401, 200]


@starts("rankbuffer-serve", ServeConfig, serve_a_group)
def served_to_the_end(at) -> dict:
    return serve(at)


@starts("rankbuffer-serve", ServeConfig, partial(serve_a_group, end=lambda: None))
def served_for_a_price(at) -> dict:
    rows = {name: To(value_of(row)) for name, row in serve(at).items()}
    return rows | {"judge_price_budget": To(1e-4, "judge_price_budget=0.00: ends after")}


@starts("rankbuffer-serve", ServeConfig, partial(serve_a_group, end=lambda: None))
def served_for_tokens(at) -> dict:
    rows = {name: To(value_of(row)) for name, row in serve(at).items()}
    return rows | {"judge_token_budget": To(50, "judge_token_budget=50: ends after")}


def ask_async_reward(at, values: dict) -> None:
    """Make the reward, send it to another folder as the trainer's worker does, and reward one group."""
    config = JudgeConfig(**{name: value for name, value in values.items() if name.startswith("judge_")})
    given = {name: value for name, value in values.items() if not name.startswith("judge_")} | {"judge": config}
    at.ends.patch.chdir(at.tmp)
    reward = pickle.loads(pickle.dumps(AsyncRankBufferReward(**given)))
    at.out.mkdir()
    at.ends.patch.chdir(at.out)
    query, other = at.howto[:2]
    texts = [f"<think>a plan</think>{text}" for text in other["responses"]]

    async def play() -> None:
        try:
            await reward([query["prompt"]] * len(texts), texts, [query["query_id"]] * len(texts))
        finally:
            await reward.close()

    asyncio.run(play())


@starts("AsyncRankBufferReward", settings_of(JudgeConfig) | settings_of(AsyncRankBufferReward), ask_async_reward)
def async_reward(at) -> dict:
    at.ends.door("rankbuffer_tools.service.async_grpo.SingleGroups")
    BufferStore(at.tmp / "live.sqlite").close()
    return judge(at) | {
        "judge_max_failures": To(0.75, {"max_failures": 0.75}),
        "dataset": To(Dataset.from_list(at.howto), at.howto[0]["prompt"][0]["content"]),
        "judge": To("all of the judge's settings", True),
        "store": To("live.sqlite", {"store": at.tmp / "live.sqlite"}),
        "method": To(RankBuffer(k0=3), {"method.k0": 3}),
        "reader": To(AnswerReader("think"), lambda ends: "a plan" not in ends.asked),
        "timeout": 88.0,
        "resume": To(True, True),
    }  # fmt: skip


def ask_reward(at, values: dict) -> None:
    reward, (query, other) = RankBufferReward(**values), at.howto[:2]
    texts = [f"<think>a plan</think>{text}" for text in other["responses"][:3]]
    try:
        assert len(reward([query["prompt"]] * 3, texts, [query["query_id"]] * 3)) == 3
    finally:
        reward.close()


@starts("RankBufferReward", RankBufferReward, ask_reward)
def stock_reward(at) -> dict:
    at.ends.door("rankbuffer_trl.training.reward_function.GroupScorer")
    at.ends.door("rankbuffer_trl.training.reward_function.BufferStore")
    of_judge = {name: value_of(row) for name, row in judge(at).items()}
    return {
        "dataset": To(Dataset.from_list(at.howto), at.howto[0]["prompt"][0]["content"]),
        "judge": To(JudgeConfig(**of_judge).judge(), '"model": "mine"'),
        "store": To(at.out / "live.sqlite", {"path": at.out / "live.sqlite"}),
        "num_generations": To(3, True),
        "method": To(RankBuffer(k0=3), {"method.k0": 3}),
        "reader": To(AnswerReader("think"), lambda ends: "a plan" not in ends.asked),
        "max_failures": 0.75,
        "step_timeout": 88.0,
    }


HANDED = {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "hub_private_repo"}
HANDED |= {
    "model_name_or_path",
    "model_revision",
    "attn_implementation",
    "dtype",
    "use_peft",
}  # of TRL, which we pass on
TRAIN = {name: default for group in TRAINING for name, default in settings_of(group).items()}
TRAIN = {name: default for name, default in TRAIN.items() if name in OURS | JUDGE | HANDED}
run_training = partial(run_program, "rankbuffer-train", TRAIN)


def training(at) -> dict:
    """The rows of all starts of a training that is small."""
    known = {"model_name_or_path": at.policy, "num_generations": 4, "per_device_train_batch_size": 8, "max_steps": 2}
    known |= {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 16, "save_steps": 1}
    return {name: To(value) for name, value in known.items()} | data(at) | {"output_dir": To(str(at.out))}


@starts("rankbuffer-train", TRAIN, run_training)
def preflight(at) -> dict:
    return training(at) | judge(at) | {
        "judge_completion_price": To(4.0, "at the prices given"),
        "judge_samples": To(6, {"samples": 6}),
        "judge_price_budget": To(1e-3, "[preflight] the budget ends at about step 1 of 2"),
        "push_to_hub": To(True),
        "hub_token": To("a-token"),
        "hub_private_repo": To(False, "public: everybody can read it"),
        "preflight_only": To(True, "[preflight] sample: "),
        "recipe_queries_per_step": To(5, "the recipe is for 5: "),
        "num_processes": To(2, "processes: 2, as given"),
    }  # fmt: skip


@starts("rankbuffer-train", TRAIN, run_training)
def dry_run(at) -> dict:
    budget = To(1000, "[dry run] the budget ends at about step 1 of 2")
    return training(at) | {"judge_token_budget": budget, "dry_run": To(True, "--preflight_only asks the judge")}


@starts("rankbuffer-train", TRAIN, partial(run_training, fails=True))
def dry_run_without_data(at) -> dict:
    rows = training(at) | {"dry_run": To(True), "dataset_name": To("missing.jsonl"), "dataset_config": To(None)}
    return rows | {"dataset_train_split": To("train"), "dry_run_queries": To(77, "dry_run_queries=77")}


@starts("rankbuffer-train", TRAIN, partial(run_training, fails=True))
def a_long_prompt(at) -> dict:
    return training(at) | {"max_prompt_length": To(3, "tokens, max_prompt_length is 3")}


def train_and_resume(at, values: dict) -> None:
    from rankbuffer_trl.training.trainer import RankBufferTrainer

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
    for path in (
        *("training.scorer.GroupScorer", "training.trainer.AnswerReader", "training.reward_function.step_metrics"),
        *("training.trainer.GroupReward.begin", "training.trainer.scale_by_signal", "exact.trainer.check_trusted"),
        "exact.checkpoint.Checkpoints.resumable",
    ):
        at.ends.door(f"rankbuffer_trl.{path}")
    at.ends.door("rankbuffer_tools.train.command.RankBufferTrainer")
    function = {"function": "trl.rewards.think_format_reward", "weight": 0.25}
    return training(at) | judge(at) | {
        "judge_max_failures": To(0.75, {"max_failures": 0.75}),
        "judge_step_timeout": To(88.0, {"step_timeout": 88.0}),
        "judge_samples": To(6, {"samples": 6}),
        "dataset_test_split": To("seen", True),
        "eval_strategy": To("steps"),
        "eval_steps": To(1),
        "per_device_eval_batch_size": To(8),
        "method": To("listwise", lambda ends: '"Listwise"' in ends.given["method"]),
        "method_args": To({"looks": 4}, {"method.looks": 4}),
        "scale_by_signal": To(True, lambda ends: ends.given["weights"]),
        "judge_noise": To(0.3, {"noise": 0.3}),
        "judge_during_generation": To(False, lambda ends: not ends.given["training"]),
        "format_check": To("(?s)(?P<answer>.+)", {"check": "(?s)(?P<answer>.+)"}),
        "format_weight": To(0.5, "'format_reward': 0.5"),
        "reward_functions": To([function], "'think_format_reward': 0.25"),
        "on_stop_command": To(f"touch {at.out}/stopped", "file stopped"),
        "resume_with_changes": To(True, {"with_changes": True}),
        "trust_checkpoint": To(True, {"trusted": True}),
        "model_name_or_path": To(at.policy, lambda ends: plain(at.policy) in ends.given["model"]),
        "model_revision": To("mine", "'revision': 'mine'"),
        "attn_implementation": To("eager", "'attn_implementation': 'eager'"),
        "dtype": To("bfloat16", "'dtype': 'bfloat16'"),
        "use_peft": To(True, lambda ends: ends.among("kwargs", '"peft_config": "LoraConfig"')),
    }  # fmt: skip


def use_library(at, values: dict) -> None:
    """Make a trainer with tools, and one whose rollouts come from a server."""
    from transformers import AutoTokenizer

    from rankbuffer_trl.training.rollouts import separate_rollouts
    from rankbuffer_trl.training.trainer import RankBufferTrainer

    def tell_time(place: str) -> str:
        """Tell the time.

        Args:
            place: The place.
        """
        return place

    args = RankBufferConfig(**values)
    tokenizer = AutoTokenizer.from_pretrained(at.policy)
    tokenizer.chat_template = of_trl("qwen3")
    RankBufferTrainer(
        at.policy, args, Dataset.from_list(at.howto), tools=[tell_time], processing_class=tokenizer
    ).close()
    absent = dict.fromkeys(("tools", "rollout_func", "environment_factories"))
    separate_rollouts(MagicMock(**absent, vllm_mode="server", args=args), print)


@starts("rankbuffer-train", TRAIN, use_library)
def the_library(at) -> dict:
    at.ends.door("rankbuffer_trl.training.trainer.AnswerReader")
    at.ends.door("rankbuffer_trl.training.rollouts.SeparateRollouts", instead=lambda *args: None)
    absent = {"model_name_or_path", *data(at)}
    return {name: row for name, row in training(at).items() if name not in absent} | {
        "judge_view": To("transcript", {"view": "transcript"}),
        "judge_view_limit": To(77, {"limit": 77}),
        "rollout_timeout": To(66.0, {"timeout": 66.0}),
    }


@dataclass
class Own(RubricJudge):
    """A client of one's own."""

    word: str = ""


OWNERS = {
    ServeConfig: {"output_dir": "out"},
    AuditConfig: {"dataset_name": "a.jsonl", "samples": "a.jsonl"},
    RejudgeConfig: {"run_dir": "a", "dataset_name": "a.jsonl"},
    RubricsConfig: {"dataset_name": "a.jsonl"},
    ResponsesConfig: {"dataset_name": "a.jsonl", "sampler_url": "http://a", "sampler_model": "a"},
    JudgeConfig: {},
    RankBufferConfig: {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": "none"},
}


@pytest.mark.parametrize("owner", OWNERS)
def test_a_judge_may_be_a_client_of_ones_own(owner):
    config = owner(**OWNERS[owner], judge_client=f"{__name__}.Own", judge_client_args={"word": "x"})
    assert config.judge().client == Own("x")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "a_run" else n for n in STARTS])
def test_each_setting_arrives(name, at, capsys):
    program, owner, make, play = STARTS[name]
    rows = make(at)
    values = {setting: value_of(row) for setting, row in rows.items()}
    (play or partial(run_program, program, owner))(at, values)
    at.ends.lines.append(capsys.readouterr().out)
    at.ends.add_files(at.out)
    assert not [*at.ends.unseen(rows)]


def test_each_setting_has_a_row(at):
    seen: dict[str, dict] = defaultdict(dict)
    owners = defaultdict(dict)
    for program, owner, make, _ in STARTS.values():
        owners[program] |= settings_of(owner)
        seen[program] |= {n: value_of(row) for n, row in make(at).items() if not isinstance(row, To) or row.end}
    for program, known in owners.items():
        assert seen[program].keys() == known.keys() - CLIENT, program
        assert not [name for name, value in seen[program].items() if value == known[name]], f"defaults of {program}"
    assert owners.keys() >= PROGRAMS.keys() - {"recipes/train_rankbuffer.py"}
