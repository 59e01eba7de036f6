"""Before a run: what is wrong with a judge is said at once, and what the run will cost is near what it then costs."""

import asyncio
import json
import re
import socket
from contextlib import contextmanager

import pytest
from aiohttp import web
from conftest import QUICKSTART
from helpers.http_server import served
from helpers.scripted import config, run

from rankbuffer_trl.data.queries import QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError, RubricJudge
from rankbuffer_trl.judge.serve import make_app
from rankbuffer_trl.training.plan import RunPlan
from rankbuffer_trl.training.preflight import preflight


@pytest.fixture
def queries(rows) -> QueryTable:
    return QueryTable(rows, anchors_needed=4)


@contextmanager
def vllm_like(context: int, answer=None, **listed):
    """The embedded judge behind the endpoints that vLLM has: a context length, and a tokenizer that counts words."""

    async def models(request):
        return web.json_response(
            {"object": "list", "data": [{"id": "rubric-judge", "max_model_len": context} | listed]}
        )

    async def tokenize(request):
        [message] = (await request.json())["messages"]
        return web.json_response({"count": len(message["content"].split()), "max_model_len": context})

    async def chat(request):
        asked.append(await request.json())
        if answer is not None:
            response = answer()
            return await response if asyncio.iscoroutine(response) else response
        text, usage = RubricJudge().answer(asked[-1]["messages"])
        return web.json_response(
            {
                "choices": [{"message": {"role": "assistant", "content": text}}],
                "usage": {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion},
            }
        )

    asked: list[dict] = []
    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/tokenize", tokenize)])
    app.add_routes([web.post("/v1/chat/completions", chat)])
    with served(app) as address:
        yield address + "/v1", asked


def check(args, queries) -> str:
    return "\n".join(asyncio.run(preflight(RunPlan.of(args, queries, None))))


def settings(tmp_path, url=None, **overrides):
    judge = {"judge_url": url, "judge_model": "rubric-judge"} if url else {}
    return config(tmp_path, **(judge | {"judge_max_retries": 0} | overrides))


def test_the_embedded_judge_needs_no_server(tmp_path, queries):
    text = check(settings(tmp_path), queries)
    assert "sample: 64 judgments" in text
    assert "24 groups of 8 rollouts, 192 to 288 judgments" in text
    assert "context" not in text


def test_a_run_costs_what_was_estimated(tmp_path, tiny_policy, queries, rows):
    text = check(settings(tmp_path / "check", judge_concurrency=12 * 8), queries)
    low, high = (int(number) for number in re.search(r"(\d+) to (\d+) judgments", text).groups())
    calls = run(tmp_path / "run", tiny_policy, rows)["calls"]
    assert 0.8 * low <= len(calls) <= high  # rollouts without an answer are not judged


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"num_train_epochs": 3}, "36 groups of 8 rollouts, 288 to 432 judgments"),
        ({"max_steps": 5}, "15 groups of 8 rollouts, 120 to 180 judgments"),
        ({"max_steps": 5, "gradient_accumulation_steps": 2}, "30 groups of 8 rollouts, 240 to 360 judgments"),
        ({"max_steps": 6, "num_iterations": 2}, "9 groups of 8 rollouts, 72 to 108 judgments"),
        ({"per_device_train_batch_size": 40}, "20 groups of 8 rollouts, 160 to 240 judgments"),  # 5 of 12, twice
        ({"method_args": {"fine": False}}, "24 groups of 8 rollouts, 192 judgments"),
    ],
    ids=str,
)
def test_the_estimate_follows_the_schedule(tmp_path, queries, overrides, expected):
    assert expected in check(settings(tmp_path, **overrides), queries)


def test_a_bootstrapped_run_asks_once_for_each_first_visit(tmp_path, rows):
    text = check(settings(tmp_path, method_args={"bootstrap": True}), QueryTable(rows))
    assert "24 groups of 8 rollouts, 108 to 156 judgments" in text  # 12 x 1 + 12 x (8 to 12)
    assert "no reference responses" in text


def test_every_server_is_named_with_its_context(tmp_path, queries):
    with vllm_like(4096) as (first, asked), vllm_like(8192) as (second, others):
        text = check(settings(tmp_path, [first, second], judge_concurrency=4), queries)
    assert f"rubric-judge at {first}, context 4,096 tokens" in text
    assert f"rubric-judge at {second}, context 8,192 tokens" in text
    assert "sample: 8 judgments" in text
    assert len(asked) + len(others) == 9  # the sample, after one first question
    assert re.search(r"longest prompt of a first visit: \d+ tokens \(query '[\w-]+'\)", text)


def test_a_prompt_that_is_certain_to_come_must_fit(tmp_path, queries):
    with vllm_like(500) as (url, asked), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url), queries)
    assert asked == []
    for part in ("context of 500 tokens is too short", "first prompt of query", "--max-model-len"):
        assert part in str(error.value)


def test_the_shortest_of_several_contexts_counts(tmp_path, queries):
    with (
        vllm_like(8192) as (first, _),
        vllm_like(500) as (second, _),
        pytest.raises(JudgeError, match="of 500 tokens"),
    ):
        check(settings(tmp_path, [first, second]), queries)


def test_room_for_the_verdict_counts_too(tmp_path, queries):
    with vllm_like(8192) as (url, _):
        text = check(settings(tmp_path, url), queries)
    longest = int(re.search(r"first visit: (\d+) tokens", text).group(1))
    verdict = len('{"position": 4}') + 1
    with vllm_like(longest + verdict) as (url, _):
        check(settings(tmp_path, url, judge_decoding="regex"), queries)
    with vllm_like(longest + verdict - 1) as (url, _), pytest.raises(JudgeError, match=f"may take {verdict}"):
        check(settings(tmp_path, url, judge_decoding="regex"), queries)


def test_a_later_prompt_that_may_not_fit_is_announced(tmp_path, queries):
    with vllm_like(2048) as (url, _):
        assert "stays unscored" in check(settings(tmp_path, url, max_completion_length=400), queries)
        assert "stays unscored" not in check(settings(tmp_path, url, max_completion_length=24), queries)


def test_the_length_of_a_later_prompt_is_that_of_the_method(tmp_path, rows):
    def announced(method, **arguments):
        with vllm_like(2048) as (url, _):
            args = settings(tmp_path, url, method=method, method_args=arguments, max_completion_length=4000)
            text = check(args, QueryTable(rows, args.reward_method().responses_needed))
        shown, tokens = re.search(
            r"may show (\d+) responses; it and its answer may need about ([\d,]+)", text
        ).groups()
        return int(shown), int(tokens.replace(",", ""))

    for method, arguments, shown in (
        ("pointwise", {}, 1),
        ("rrc_agr", {}, 2),
        ("rankbuffer", {}, 9),
        ("rankbuffer", {"k0": 6, "bootstrap": True}, 13),
        ("rankbuffer", {"anchor_content": False}, 8),
        ("llm_buffer", {"look_ahead": True}, 20),
    ):
        found, tokens = announced(method, **arguments)
        assert found == shown
        assert 0 < tokens - shown * 4500 < 1500, "query, rubrics, template and two answers"


def test_a_group_that_cannot_be_split_must_fit(tmp_path, rows):
    args = {"method": "listwise", "max_completion_length": 200}
    with vllm_like(2048) as (url, asked), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url, **args), QueryTable(rows))
    assert asked == []
    for part in ("context of 2,048 tokens is too short for method 'listwise'", "all 8 rollouts", "length=200"):
        assert part in str(error.value)
    needed = int(re.search(r"--max-model-len (\d+) or more", str(error.value))[1])
    assert 1800 < needed < 3000
    with vllm_like(needed) as (url, _):
        assert "stays unscored" not in check(settings(tmp_path, url, **args), QueryTable(rows))
    with vllm_like(needed - 1) as (url, _), pytest.raises(JudgeError, match="would have no rewards"):
        check(settings(tmp_path, url, **args), QueryTable(rows))
    with vllm_like(needed - 1) as (url, _):  # blocks of four are half as long
        blocks = args | {"method_args": {"blocks_of_four": True, "looks": 4}}
        assert "stays unscored" not in check(settings(tmp_path, url, **blocks), QueryTable(rows))
    with vllm_like(needed // 2) as (url, _):  # a block that does not fit is not the group
        assert "may show 4 responses" in check(settings(tmp_path, url, **blocks), QueryTable(rows))


def test_a_server_that_cannot_count_gives_an_estimate(tmp_path, queries):
    with served(make_app()) as address:
        text = check(settings(tmp_path, address + "/v1"), queries)
    assert re.search(r"longest prompt of a first visit: about \d+ tokens", text)


def test_a_server_that_serves_another_model_is_refused(tmp_path, queries):
    with vllm_like(4096, id="Qwen/Qwen3-4B") as (url, asked), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url), queries)
    assert asked == []
    for part in (url, "does not serve judge_model='rubric-judge'", "'Qwen/Qwen3-4B'"):
        assert part in str(error.value)


def test_a_server_that_is_not_there_is_named(tmp_path, queries):
    with socket.socket() as unused, vllm_like(4096) as (there, asked):
        unused.bind(("127.0.0.1", 0))
        missing = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(JudgeError) as error:
            check(settings(tmp_path, [there, missing]), queries)
    assert f"the judge server {missing} cannot be reached, so nothing was started" in str(error.value)
    assert asked == []


def test_a_sample_of_failures_stops_before_the_run(tmp_path, queries):
    answers = iter(['{"position": 1}'] + ["Hello!"] * 1000)

    def answer():
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": next(answers)}}]})

    with vllm_like(4096, answer) as (url, _), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url, judge_concurrency=4), queries)
    assert "failed 4 of 4 questions of a sample" in str(error.value)
    assert "flat JSON object" in str(error.value)


def saying(text: str, usage: dict | None = None):
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


def test_a_sample_that_fails_shows_what_was_answered(tmp_path, queries):
    answers = iter(['{"position": 1}'] + ["Hello!"] * 1000)
    with vllm_like(4096, lambda: saying(next(answers))) as (url, _), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url, judge_concurrency=4), queries)
    assert "The last answer begins: 'Hello!'. Is it an instruction-tuned chat model?" in str(error.value)


def test_the_cost_counts_repeated_and_failed_answers_and_the_first_question(tmp_path, queries):
    usage = {"prompt_tokens": 100_000, "completion_tokens": 10}
    answers = iter(['{"position": 1}', *["Hello!"] * 9])
    with vllm_like(4096, lambda: saying(next(answers), usage)) as (url, asked):
        text = check(settings(tmp_path, url, judge_concurrency=3, judge_max_failures=1.0), queries)
    assert len(asked) == 10
    assert "3 failed, 6 asked again; this check cost 1,000,100 tokens" in text
    judgments, tokens = re.search(r"(\d+) to \d+ judgments, ([\d.]+) M to", text).groups()
    assert float(tokens) == round(int(judgments) * 3 * 100_010 / 1e6, 1)


def test_a_server_that_reports_no_usage_is_said_to_do_so(tmp_path, queries):
    with vllm_like(4096, lambda: saying('{"position": 1}')) as (url, _):
        assert "reports no token counts" in check(settings(tmp_path, url, judge_concurrency=2), queries)
    with vllm_like(4096) as (url, _):
        assert "reports no token counts" not in check(settings(tmp_path, url, judge_concurrency=2), queries)


@pytest.mark.parametrize(
    "budget",
    [{"judge_token_budget": 9}, {"judge_price_budget": 1.0, "judge_prompt_price": 1.0, "judge_completion_price": 1.0}],
)
def test_a_budget_needs_a_server_that_counts(tmp_path, queries, budget):
    with vllm_like(4096, lambda: saying('{"position": 1}')) as (url, _), pytest.raises(SettingsError) as error:
        check(settings(tmp_path, url, judge_concurrency=2, **budget), queries)
    assert "so a budget cannot end the run" in str(error.value)
    with vllm_like(4096) as (url, _):
        assert "the run:" in check(settings(tmp_path, url, judge_concurrency=2, **budget), queries)


def test_a_prompt_is_shown_when_nothing_else_is_wanted(tmp_path, queries):
    answer = 'Let\x1b[2J me see:\n{"position": 1}'
    with vllm_like(4096, lambda: saying(answer)) as (url, asked):
        shown = check(settings(tmp_path, url, judge_concurrency=1, preflight_only=True), queries)
        plain = check(settings(tmp_path, url, judge_concurrency=1), queries)
    prompt = asked[0]["messages"][0]["content"]
    lines = ["the first prompt:", *(f"  | {line}" for line in prompt.splitlines())]
    lines += ["its answer:", r"  | Let\x1b[2J me see:", '  | {"position": 1}']
    assert "\n".join(lines) in shown
    assert "prompt:" not in plain and prompt.splitlines()[-1] not in plain


def test_a_sample_has_an_end(tmp_path, queries):
    answers = iter([saying('{"position": 1}')])

    async def hang():
        await asyncio.Event().wait()

    with vllm_like(4096, lambda: next(answers, None) or hang()) as (url, _), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url, judge_concurrency=2, judge_step_timeout=0.5), queries)
    assert "did not finish a sample within judge_step_timeout=0.5 s: 0 of 2 questions" in str(error.value)


def test_preflight_only_stops_before_a_policy_is_loaded(tmp_path, capsys):
    from rankbuffer_trl.training import command
    from rankbuffer_trl.training.parser import RecipeParser

    arguments = [
        *("--config", str(QUICKSTART / "quickstart.yaml"), "--dataset_name", str(QUICKSTART / "howto.jsonl")),
        *("--model_name_or_path", str(tmp_path / "there-is-no-policy"), "--output_dir", str(tmp_path / "run")),
        *("--preflight_only", "true"),
    ]
    command.run(*RecipeParser().parse_args_and_config(arguments))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[preflight] the run: 576 groups of 8 rollouts, 4,608 to 6,912")]
    assert not (tmp_path / "run").exists()


def test_a_request_can_be_given_as_json(tmp_path):
    text = json.dumps({"chat_template_kwargs": {"enable_thinking": False}, "seed": None})
    with vllm_like(4096) as (url, asked):
        args = settings(tmp_path, url, judge_request=text)
        asyncio.run(preflight(RunPlan.of(args, load(QUICKSTART / "howto.jsonl"), None)))
    assert asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "seed" not in asked[0] and "temperature" in asked[0]


def load(path):
    from rankbuffer_trl.data.queries import load_queries

    return load_queries(str(path))
