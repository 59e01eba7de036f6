"""Before a run: the judge is reached, its context is long enough, and the run costs what was estimated."""

import asyncio
import json
import random
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import pytest
from aiohttp import web
from conftest import QUICKSTART, ROOT
from helpers.judges import spelled
from helpers.scripted import config, run
from helpers.servers import served
from transformers import Qwen3Config
from trl import ModelConfig

from rankbuffer_tools.batch.recipes import read_recipe
from rankbuffer_tools.batch.script import duration, short
from rankbuffer_tools.batch.server_check import estimate_tokens
from rankbuffer_tools.rubric_server import make_app
from rankbuffer_tools.train import command
from rankbuffer_tools.train.memory import memory_line
from rankbuffer_tools.train.parser import RecipeParser
from rankbuffer_tools.train.preflight import preflight, report
from rankbuffer_tools.train.price import RunPrice
from rankbuffer_trl.data._queries import QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Rollout, RolloutGroup
from rankbuffer_trl.judge import Judge, JudgeError, RubricJudge, Totals, Usage, pairwise_question
from rankbuffer_trl.judge._quoting import LONGEST_QUOTED
from rankbuffer_trl.rewards._method import RewardMethod, score_by_reward
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE, read_store
from rankbuffer_trl.training._first import first_question
from rankbuffer_trl.training._plan import RunPlan, spent_before
from rankbuffer_trl.training._scorer import open_scorer

PLACED = '{"position": 1}'


@pytest.fixture
def queries(rows) -> QueryTable:
    return QueryTable(rows, anchors_needed=4)


def saying(text: str, usage: dict | None = None, **more) -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}} | more
    return web.json_response({"choices": [choice], "usage": usage})


async def rubric_judge(asked: dict) -> web.Response:
    text, usage = RubricJudge().answer(asked["messages"])
    return saying(text, {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion})


@contextmanager
def listening(listed: dict, tokenize: Callable, answer: Callable = rubric_judge, **more: Callable):
    """Serve a judge: its address, and the questions that it was asked. A path has a function of the request's body."""
    asked: list[dict] = []

    def ask(body: dict) -> Awaitable[web.Response] | web.Response:
        asked.append(body)
        return answer(body)

    def handler(respond: Callable) -> Callable:
        async def handle(request: web.Request) -> web.Response:
            made = respond(await request.json() if request.can_read_body else {})
            made = await made if asyncio.iscoroutine(made) else made
            return web.json_response(made) if isinstance(made, dict) else made

        return handle

    listing = {"object": "list", "data": [{"id": "rubric-judge"} | listed]}
    paths = {"/v1/models": lambda _: listing, "/v1/chat/completions": ask, "/tokenize": tokenize} | more
    with served({path: handler(respond) for path, respond in paths.items()}) as address:
        yield address + "/v1", asked


def vllm_like(context: int, answer: Callable | None = None, **listed):
    """The embedded judge behind the endpoints that vLLM has: a context length, and a tokenizer that counts words."""

    def tokenize(body: dict) -> dict:
        return {"count": len(body["messages"][0]["content"].split()), "max_model_len": context}

    answers = {} if answer is None else {"answer": lambda _: answer()}
    return listening({"max_model_len": context} | listed, tokenize, **answers)


def llama_like(context: int):
    """A server with the endpoints of llama.cpp. Its template adds two words to a prompt."""
    template = {"/apply-template": lambda body: {"prompt": f"<user> {body['messages'][0]['content']} <judge>"}}
    meta = {"meta": {"n_ctx": context, "n_ctx_train": 32_768}}
    tokens = lambda body: {"tokens": body["content"].split() if body.get("parse_special") else []}  # noqa: E731
    return listening(meta, tokens, **template)


def check(args, queries) -> str:
    return "\n".join(asyncio.run(preflight(RunPlan.of(args, queries, None))))


def settings(tmp_path, url=None, **overrides):
    judge = {"judge_url": url, "judge_model": "rubric-judge"} if url else {}
    return config(tmp_path, **(judge | {"judge_max_retries": 0} | overrides))


# The cost


def test_cost_follows_the_schedule_and_the_method(tmp_path, queries, rows):
    bootstrap = {"method_args": {"bootstrap": True}}
    for overrides, expected in (
        (bootstrap, "24 groups of 8 rollouts, 108 to 156"),  # 12 x 1 + 12 x (8 to 12)
        ({}, "24 groups of 8 rollouts, 192 to 288"),
        ({"num_train_epochs": 3}, "36 groups of 8 rollouts, 288 to 432"),
        ({"max_steps": 5}, "15 groups of 8 rollouts, 120 to 180"),
        ({"max_steps": 5, "gradient_accumulation_steps": 2}, "30 groups of 8 rollouts, 240 to 360"),
        ({"max_steps": 6, "num_iterations": 2}, "9 groups of 8 rollouts, 72 to 108"),
        ({"per_device_train_batch_size": 40}, "20 groups of 8 rollouts, 160 to 240"),  # 5 of 12, twice
        ({"num_generations": 4, "per_device_train_batch_size": 4}, "24 groups of 4 rollouts, 96 to 144"),
        ({"method_args": {"fine": False}}, "24 groups of 8 rollouts, 192"),
    ):
        table = QueryTable(rows) if overrides is bootstrap else queries
        plan = RunPlan.of(settings(tmp_path, **overrides), table, None)
        checked, estimated = "\n".join(asyncio.run(preflight(plan))), "\n".join(RunPrice(plan).estimated_cost())
        assert "context" not in checked
        for said in (checked, estimated):  # preflight and dry run say the same
            assert f"the run: {expected} judgments," in said, overrides
            assert "no responses" not in said
    resumed = replace(RunPlan.of(settings(tmp_path, **bootstrap), QueryTable(rows), None), done=2)
    assert RunPrice(resumed).judgments() == (18, 6 + 12 * 8, 6 + 12 * 12), "6 first visits are left"


def test_a_run_costs_what_was_estimated(tmp_path, tiny_policy, queries, rows):
    plan = RunPlan.of(settings(tmp_path / "check", judge_concurrency=12 * 7, judge_prompt_price=1e3), queries, None)
    measured, estimated = "\n".join(asyncio.run(preflight(plan))), "\n".join(RunPrice(plan).estimated_cost())
    assert "sample: 84 judgments" in measured and "of judging at this rate" in measured
    assert "tokens are estimated by characters" in estimated and "rate" not in estimated
    run_calls = run(tmp_path / "run", tiny_policy, rows)["calls"]
    with closing(read_store(tmp_path / "run")) as store:
        real = store.totals().spent_tokens / 1e3
    for text in (measured, estimated):
        found = re.search(r"(\d+) to (\d+) judgments, about (.+)k tokens, about (.+) at the prices", text)
        low, high, tokens, price = map(float, found.groups())
        assert tokens == pytest.approx(price, rel=0.05), "at a price of 1,000 a million"
        assert 0.8 * low <= len(run_calls) <= high  # rollouts without an answer are not judged
        assert real < tokens < 2 * real, "rollouts are cut here, and some are empty"


PATHS = sorted(path for folder in ("paper", "beyond") for path in (ROOT / "recipes" / folder).glob("*.yaml"))
RECIPES = {str((each["method"], each.get("method_args"))): each for each in map(read_recipe, PATHS)}


class Counting(RubricJudge):
    """The embedded judge. It counts tokens by characters, as the plan does without a judge."""

    def answer(self, messages):
        text, _ = super().answer(messages)
        return text, Usage(sum(len(each["content"]) for each in messages) // 3, 0, len(text) // 3)


def announced(lines: list[str]) -> list[float]:
    found = re.search(r"about (\S+)(?: to (\S+))? tokens", lines[0])
    return [float(each[:-1]) * {"k": 1e3, "M": 1e6}[each[-1]] for each in found.groups() if each]


@pytest.mark.parametrize("name", RECIPES)
def test_cost_of_each_recipe_is_that_of_a_replay_of_four_epochs(name, tmp_path, rows, scorer, monkeypatch):
    """With rollouts like the references. A set without them has a range, whose ends are far apart."""
    monkeypatch.setattr("rankbuffer_tools.train.price.MAX_REHEARSED_QUERIES", 1)
    more = ["", *(" And so on." * n for n in (20, 60))]  # no two queries are of one length
    texts = [[text + more[i] for text in row["responses"]] for i, row in enumerate(rows.select(range(3)))]
    written = rows.select(range(3)).remove_columns("responses").add_column("responses", texts)
    args = config(tmp_path, **{"num_train_epochs": 4, "max_completion_length": 400}, **method_of(RECIPES[name]))
    plan, draw = RunPlan.of(args, written, None), random.Random(5)
    made = scorer(Judge(Counting()), plan.method)
    for epoch in range(4):
        for query, known in zip(map(plan.queries.__getitem__, plan.queries.ids), texts, strict=True):
            rollouts = tuple(Rollout(i, draw.choice(known) + "!" * i) for i in range(8))
            made.score([RolloutGroup(query, rollouts, epoch, epoch)], epoch)
    real = made.store.totals().spent_tokens
    *least, said = announced(RunPrice(plan).estimated_cost())
    assert real / 2 < said < 2 * real
    if least:  # as much as without, if the judge agrees with itself
        once = replace(plan, method=replace(plan.method, rerank_disputed=False))
        assert least == announced(RunPrice(once).estimated_cost())
    if not plan.method.responses_needed:
        lines = RunPrice(RunPlan.of(args, written.remove_columns("responses"), None)).estimated_cost()
        low, high = announced(lines)
        assert low < real < high and high > 2 * low and "max_completion_length=400" in lines[1]


def test_a_plan_says_what_it_leaves_open(tmp_path, rows):
    paid = {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "m"}
    few, price, made = "8 steps are few: .* num_train_epochs to 9", "add judge_prompt_price", "7 responses to each"
    bare, longer = rows.remove_columns("responses"), {"num_train_epochs": 9}
    for given, data, said in (
        (paid, bare, [few, price, made]),
        (paid | {"judge_prompt_price": 1.0, "judge_completion_price": 1.0} | longer, rows, []),
        (longer, bare, [made]),
        ({"max_steps": 8}, rows, ["8 steps are few: .* so set max_steps to [0-9]+$"]),
    ):
        lines = RunPrice(RunPlan.of(config(tmp_path, method="pointwise", **given), data, None)).advice()
        assert len(lines) == len(said) and all(map(re.search, said, lines)), lines


def test_memory_is_that_of_the_page_and_counts_a_reference_policy_and_lora(tmp_path):
    """The arithmetic at the head of recipes/launch/one_node.sh: 33 + 5 + 5 = 43 GB; in float32 it is more."""
    sizes = dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, head_dim=128)
    Qwen3Config(vocab_size=151936, num_key_value_heads=8, **sizes).save_pretrained(tmp_path / "policy")
    batch = {"per_device_train_batch_size": 2, "max_prompt_length": 4096, "max_completion_length": 4096}
    policy = ModelConfig(model_name_or_path=str(tmp_path / "policy"), dtype="bfloat16")
    for given, model, said in (
        ({}, policy, r"about 43 GB = 33 GB of weights, gradients and optimizer \+ 4.8 GB of .* \+ 5 GB of the output"),
        ({"beta": 0.1}, policy, "about 47 GB = 37 GB"),
        ({"beta": 0.1}, replace(policy, dtype="float32"), "about 56 GB = 41 GB .* 9.7 GB of checkpointed"),
        ({}, replace(policy, use_peft=True), r"about 8.9 GB = 4.1 GB .* \+ 4.8 GB of checkpointed activations$"),
        ({"gradient_checkpointing": False}, policy, "take many times this"),
        ({"use_vllm": True, "vllm_mode": "colocate"}, policy, "vLLM takes 0.3 of the GPU besides"),
        ({}, ModelConfig(model_name_or_path="org/not-here"), "not computed, because the policy's config is not on"),
    ):
        args = config(tmp_path, dry_run=True, num_processes=4, **batch, **given)
        assert re.search(said, memory_line(args, model)), memory_line(args, model)


def test_report_counts_its_questions_as_spent_if_the_run_starts_after_it(tmp_path, rows, capsys):
    for only in (True, False):
        report(RunPlan.of(config(tmp_path / "run", preflight_only=only), rows, None))
        said = re.search(r"this check cost ([\d,]+) tokens", capsys.readouterr().out)[1]
        assert (tmp_path / "run").exists() != only
        assert only or f"{spent_before(tmp_path / 'run', None).spent_tokens:,}" == said


def method_of(recipe: dict) -> dict:
    return {key: recipe[key] for key in ("method", "method_args") if key in recipe}


@dataclass(frozen=True)
class Sparing(RewardMethod):
    """It asks about groups of `least` rollouts or more."""

    least: int
    name = "sparing"

    async def score(self, group, buffer, judge):
        if len(group.answered) >= self.least:
            await judge.ask(pairwise_question(group.query, *[rollout.text for rollout in group.answered[:2]]))
        return score_by_reward(group, {rollout.id: 0.0 for rollout in group.answered})


def test_method_that_asks_nothing_is_refused_and_one_may_ask_nothing_about_two_rollouts(tmp_path, rows, query):
    for least in (3, 99):
        args = config(tmp_path, method=f"{__name__}.Sparing", method_args={"least": least})
        refused = pytest.raises(SettingsError, match="'sparing' asks the judge nothing")
        refused = refused if least > 8 else nullcontext()
        with closing(open_scorer(args, None)) as scorer, refused:
            first_question(scorer, query)
        with refused:
            RunPrice(RunPlan.of(args, rows, None)).estimated_cost()


def test_cost_says_at_which_step_a_budget_ends(tmp_path, rows):
    """A method whose visits cost the same. Half of the prompt tokens are cached, for a quarter of the price."""
    sample = Totals(spent_prompt_tokens=6_000_000, spent_cached_tokens=3_000_000)  # in one epoch of 12 x 8 questions
    prices = dict(judge_prompt_price=1.0, judge_completion_price=0.0)
    better = {"judge_url": "http://127.0.0.1:9/v1", "judge_model": "better"}
    reader = {"reference_judge": better, "reference_groups": 12}
    for budget, said in (
        ({"judge_token_budget": 6_000_000}, "ends at about step 4 of 8"),
        ({"judge_token_budget": 12_000_001}, "lasts to the end of the run"),
        ({"judge_token_budget": 6_000_000, **reader}, "ends at about step 2 of 8"),
        ({"judge_price_budget": 6.0, **prices}, "ends at about step 4 of 8"),
        ({"judge_price_budget": 6.0, **prices, "judge_cached_price": 0.25}, "ends at about step 7 of 8"),
    ):
        plan = RunPrice(RunPlan.of(config(tmp_path, method="pointwise", **budget), rows, None))
        asked = plan.first_questions
        assert plan.cost(asked, sample)[-1] == f"the budget {said}"
    with closing(BufferStore(tmp_path / LIVE_STORE)) as store:
        store.spend(Usage(2_000_000, 1_000_000, 0))
    assert plan.cost(asked, sample)[-1] == "the budget ends at about step 6 of 8", "the folder has taken 1.25"
    args = config(tmp_path, method="pointwise", reference_judge=better, reference_groups=6)
    read = RunPrice(RunPlan.of(args, rows, None))
    assert "the reference judge takes about 3.0M of these tokens, for 6 groups" in read.cost(asked, sample)
    plan = RunPrice(RunPlan.of(config(tmp_path, method="pointwise", judge_token_budget=9_000_000), rows, None))
    assert plan.cost(asked, sample)[-1] == "the budget ends at about step 5 of 8"
    args = config(tmp_path, method="pointwise", judge_token_budget=9_000_000, max_completion_length=50_000)
    bare = RunPrice(RunPlan.of(args, rows.remove_columns("responses"), None))
    assert re.search(r"ends at about step \d to \d of 8", bare.cost(bare.first_questions, sample)[-1])


def test_cost_counts_repeated_and_failed_answers_and_the_first_question(tmp_path, queries):
    usage = {"prompt_tokens": 100_000, "completion_tokens": 10}
    answers = iter([PLACED, *["Hello!"] * 27])
    with vllm_like(4096, lambda: saying(next(answers), usage)) as (url, asked):
        limits = {"judge_concurrency": 9, "judge_max_failures": 1.0}
        text = check(settings(tmp_path, url, **limits, judge_prompt_price=2.0, judge_completion_price=4e3), queries)
    assert len(asked) == 28
    assert "9 failed, 18 asked again; this check cost 2,800,280 tokens" in text
    found = re.search(r"(\d+) to (\d+) judgments, about ([\d.]+)M tokens, about ([\d.]+) at", text)
    low, high, tokens, price = map(float, found.groups())
    assert low < tokens / (3 * 0.100_010) < high and price == pytest.approx(tokens / 0.100_010 * 0.24, rel=0.02)


def test_preflight_says_that_a_server_reports_no_usage_and_then_takes_no_budget(tmp_path, queries):
    prices = {"judge_prompt_price": 1.0, "judge_completion_price": 1.0}
    with vllm_like(4096, lambda: saying(PLACED)) as (bare, _), vllm_like(4096) as (counting, _):
        for budget in ({}, {"judge_token_budget": 9}, {"judge_price_budget": 1.0, **prices}):
            args, other = (settings(tmp_path, url, judge_concurrency=2, **budget) for url in (bare, counting))
            assert "reports no token counts" not in check(other, queries)
            if budget:
                with pytest.raises(SettingsError, match="so a budget cannot end the run"):
                    check(args, queries)
            else:
                assert "reports no token counts" in check(args, queries)


def test_duration_and_short_are_in_the_unit_that_people_use():
    seconds = {0: "0 s", 99: "99 s", 100: "2 min", 5999: "100 min", 6000: "1.7 h", 36_000: "10.0 h"}
    assert {each: duration(each) for each in seconds} == seconds
    tokens = {0: "0", 999.4: "999", 1000: "1.0k", 12_345_678: "12.3M", 4_000_000_000: "4.0G"}
    assert {each: short(each) for each in tokens} == tokens


# The probabilities of a method that reads them

SURE = spelled('{"', "score", '": ', ("8", {"8": 0.75, "7": 0.25}), "}")
CAPPED = spelled('{"', "score", '": ', ("8", {"8": 0.507}), "}")
OPEN = spelled('{"', "score", '": ', ("8", {"8": 0.6, "7": 0.2, "x": 0.2}), "}")


def test_preflight_says_of_each_server_which_probabilities_it_reports(tmp_path, queries):
    soft = {"method": "ratings_soft", "judge_concurrency": 2}
    with (
        vllm_like(4096, lambda: saying('{"score": 8}', logprobs=SURE)) as (masked, asked),
        vllm_like(4096, lambda: saying('{"score": 8}', logprobs=OPEN)) as (raw, others),
        vllm_like(4096, lambda: saying('{"score": 8}')) as (none, _),
        vllm_like(4096, lambda: saying('{"score": 8}', logprobs=CAPPED)) as (capped, _),
    ):
        text = check(settings(tmp_path, [masked, raw], judge_decoding="json_schema", **soft), queries)
        assert f"{masked} reports them, 0.0% on no valid answer" in text
        assert f"{raw} reports them before its grammar, 20.0% on no valid answer" in text
        assert len(asked) + len(others) == 2 + 8 and min(len(asked), len(others)) > 0
        assert {(each["logprobs"], each["top_logprobs"]) for each in asked + others} == {(True, 20)}
        text = check(settings(tmp_path, raw, **soft), queries)
        assert f"{raw} reports them, 20.0% on no valid answer" in text
        with pytest.raises(JudgeError, match=r"nothing was started.* returns no logprobs") as error:
            check(settings(tmp_path, [raw, none], **soft), queries)
        assert none in str(error.value) and "instruction-tuned" not in str(error.value)
        with pytest.raises(JudgeError, match=r"nothing was started.* lists 1 tokens in its logprobs, too few"):
            check(settings(tmp_path, [raw, capped], **soft), queries)
        hard = check(settings(tmp_path, raw, method="pointwise", judge_concurrency=2), queries)
        assert "probabilities" not in hard and "logprobs" not in others[-1]


def test_preflight_warns_of_a_server_whose_probabilities_have_no_doubt(tmp_path, queries):
    soft = {"method": "ratings_soft", "judge_concurrency": 2}
    certain = spelled('{"', "score", '": ', ("8", {"8": 1.0}), "}")
    for logprobs, sure in (certain, True), (SURE, False):
        with vllm_like(4096, lambda logprobs=logprobs: saying('{"score": 8}', logprobs=logprobs)) as (url, _):
            assert ("the judge is sure of each of 8" in check(settings(tmp_path, url, **soft), queries)) == sure
    assert "is sure" not in check(settings(tmp_path, **soft), queries), "the embedded judge never doubts"


def test_a_server_without_probabilities_answers_several_times(tmp_path, queries):
    def several(*scores: int):
        usage = {"prompt_tokens": 100, "completion_tokens": 7 * len(scores)}
        choices = [{"message": {"role": "assistant", "content": f'{{"score": {score}}}'}} for score in scores]
        return web.json_response({"choices": choices, "usage": usage})

    sampled = {"method": "ratings_soft", "judge_concurrency": 2, "judge_samples": 5}
    with (
        vllm_like(4096, lambda: several(7, 9, 7, 7, 3)) as (url, asked),
        vllm_like(4096, lambda: several(7)) as (one, _),
        vllm_like(4096, lambda: several(7, 7, 7, 7, 7)) as (copies, _),
    ):
        text = check(settings(tmp_path, copies, **sampled), queries)
        assert "warning: no question of a sample of 8 had two different" in text
        text = check(settings(tmp_path, url, **sampled), queries)
        assert (
            f"{url} gives 5 answers to each question, whose shares are read" in text
            and "different answers" not in text
        )
        assert "warning: each of the 8 questions of a sample has the same verdict, 7." in text
        shape = {(each["n"], each["temperature"], "logprobs" in each, "top_logprobs" in each) for each in asked}
        assert shape == {(5, 1, False, False)}
        with pytest.raises(JudgeError, match=r"fewer answers than judge_samples=5.* set judge_samples to 1") as error:
            check(settings(tmp_path, one, **sampled), queries)
        assert "Is the server up" not in str(error.value)
        check(settings(tmp_path, url, **sampled | {"judge_samples": 2}), queries)
        assert asked[-1]["n"] == 2
        check(settings(tmp_path, url, **sampled | {"method": "pointwise"}), queries)
        assert "n" not in asked[-1] and asked[-1]["temperature"] == 0, "words are asked for once"
    plans = [RunPlan.of(settings(tmp_path, url, **sampled | {"judge_samples": n}), queries, None) for n in (1, 5)]
    asked = RunPrice(plans[0]).first_questions
    once, often = (estimate_tokens(asked, True, plan.args.judge_samples) for plan in plans)
    assert (often[0], often[1]) == (once[0], 5 * once[1])
    prices = [RunPrice(plan).cost(asked)[0] for plan in plans]
    assert prices[0] != prices[1], "a price without a judge counts the answers"


# The context


def test_preflight_names_every_server_and_the_shortest_context_counts(tmp_path, queries):
    with vllm_like(4096) as (first, asked), vllm_like(8192) as (second, others), vllm_like(500) as (short, none):
        text = check(settings(tmp_path, [first, second], judge_concurrency=4), queries)
        with pytest.raises(JudgeError) as error:
            check(settings(tmp_path, [first, short]), queries)
    assert f"rubric-judge at {first}, context 4,096 tokens" in text
    assert f"rubric-judge at {second}, context 8,192 tokens" in text
    assert "sample: 8 judgments" in text
    assert (len(asked) + len(others), none) == (9, []), "the sample, after one first question"
    prompts = [body["messages"][0]["content"] for body in (*asked, *others)]
    assert len(set(prompts)) == 9, "a prompt that was asked before comes from the server's cache, and costs less time"
    assert re.search(r"longest prompt of a first visit: \d+ tokens \(query '[\w-]+'\)", text)
    for part in ("context of 500 tokens is too small", "prompt of", "--max-model-len"):
        assert part in str(error.value)


def test_preflight_reads_the_context_of_llama_cpp_and_counts_with_its_template(tmp_path, queries):
    with vllm_like(2048) as (url, _):
        words = int(re.search(r"first visit: (\d+) tokens", check(settings(tmp_path, url), queries))[1])
    with llama_like(2048) as (url, _):
        text = check(settings(tmp_path, url), queries)
    assert "context 2,048 tokens" in text and f"first visit: {words + 2} tokens" in text
    with llama_like(words) as (url, asked), pytest.raises(JudgeError, match=r"is too small.* --ctx-size") as error:
        check(settings(tmp_path, url), queries)
    assert asked == [] and len(str(error.value).splitlines()) == 1


def test_check_context_leaves_room_for_the_verdict_and_announces_later_prompts(tmp_path, queries):
    def checked(context: int, **overrides) -> str:
        with vllm_like(context) as (url, _):
            return check(settings(tmp_path, url, **overrides), queries)

    longest = int(re.search(r"first visit: (\d+) tokens", checked(8192))[1])
    verdict = len('{"position": 4}') + 1
    checked(longest + verdict, judge_decoding="regex")
    with pytest.raises(JudgeError, match=f"may take {verdict}"):
        checked(longest + verdict - 1, judge_decoding="regex")
    assert "stays unscored" in checked(2048, max_completion_length=400)
    assert "stays unscored" not in checked(2048, max_completion_length=24)
    assert "is cut" in checked(2048, max_completion_length=LONGEST_QUOTED // 3 + 1)
    assert "is cut" not in checked(2048, max_completion_length=LONGEST_QUOTED // 3)
    with served(make_app()) as address:  # a server that cannot count
        text = check(settings(tmp_path, address + "/v1"), queries)
    assert re.search(r"longest prompt of a first visit: about \d+ tokens", text)


def test_check_context_asks_the_method_how_long_a_later_prompt_is(tmp_path, rows, queries):
    for method, arguments, expected in (
        ("pointwise", {}, 1),
        ("rankbuffer", {"k0": 6, "bootstrap": True}, 13),
        ("llm_buffer", {"look_ahead": True}, 20),
    ):
        with vllm_like(2048) as (url, _):
            args = settings(tmp_path, url, method=method, method_args=arguments, max_completion_length=4000)
            text = check(args, rows)
        found = re.search(r"may show (\d+) responses; it and its answer may need about ([\d,]+)", text)
        shown, tokens = int(found[1]), int(found[2].replace(",", ""))
        assert shown == expected, method
        assert 0 < tokens - shown * 4500 < 1500, "query, rubrics, template and two answers"
    grown = {"num_train_epochs": 12, "max_completion_length": 4000}
    fits = {"judge_context": 2048}  # or k0 anchors at least
    for own, more in (({}, True), ({"method_args": {"max_anchors": 4}}, False), (fits, False)):
        with vllm_like(2048) as (url, _):
            text = check(settings(tmp_path, url, **own, **grown), queries)
        assert (int(re.search(r"may show (\d+) responses", text)[1]) > 9) == more, own
        assert ("visit 12 of a query takes" in text) == more
    with (
        vllm_like(2048) as (url, _),
        pytest.raises(JudgeError, match=r"judge_context=4096 is more than .* 2,048 tokens"),
    ):
        check(settings(tmp_path, url, judge_context=4096), queries)


def test_check_context_refuses_a_group_that_cannot_be_split(tmp_path, rows):
    def checked(context: int, **overrides) -> str:
        with vllm_like(context) as (url, asked):
            args = settings(tmp_path, url, method="listwise", max_completion_length=200, **overrides)
            with suppress(JudgeError):
                return check(args, rows)
            assert asked == []
            return check(args, rows)

    with pytest.raises(JudgeError) as error:
        checked(2048)
    for part in ("context of 2,048 tokens is too short for method 'listwise'", "all 8 rollouts", "length=200"):
        assert part in str(error.value)
    needed = int(re.search(r"--max-model-len (\d+) ", str(error.value))[1])
    assert 1800 < needed < 3000
    assert "stays unscored" not in checked(needed)
    with pytest.raises(JudgeError, match="would have no rewards"):
        checked(needed - 1)
    blocks = dict(passes=2, rerank_disputed=False, block=4)
    assert "may show 4 responses; it and its answer" in checked(needed // 2, method_args=blocks), "a list, not a group"
    assert "stays unscored" not in checked(needed - 1, method_args=blocks)


# The servers


def test_preflight_asks_nothing_if_a_server_is_missing(tmp_path, queries):
    with socket.socket() as unused, vllm_like(4096) as (there, asked):
        unused.bind(("127.0.0.1", 0))
        missing = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        reader = {"judge_url": missing, "judge_model": "better", "judge_max_retries": 0}
        with pytest.raises(JudgeError, match=f"the judge server {missing} cannot be reached, so nothing was started"):
            check(settings(tmp_path, [there, missing]), queries)
        with pytest.raises(JudgeError, match=f"the judge server {missing} cannot be reached, so nothing was started"):
            check(settings(tmp_path, there, reference_judge=reader), queries)
    assert asked == []


def test_preflight_stops_a_run_whose_sample_fails_or_never_ends(tmp_path, queries):
    answers = iter([PLACED] + ["Hello!"] * 1000)
    with vllm_like(4096, lambda: saying(next(answers))) as (url, _), pytest.raises(JudgeError) as error:
        check(settings(tmp_path, url, judge_concurrency=4), queries)
    hint = "The last answer begins: 'Hello!'. Is it an instruction-tuned chat model?"
    for part in ("failed 8 of 8 questions of a sample", "flat JSON object", hint):
        assert part in str(error.value)
    prose = vllm_like(4096, lambda: saying("Both are fine.\n\nThe second one is longer."))
    with prose as (url, asked), pytest.raises(JudgeError, match=r"^.*nothing was started.*judge_decoding.*$"):
        check(settings(tmp_path, url, judge_decoding="json_schema"), queries)
    assert len(asked) == 3

    def silent():
        """Answer the first question, whose time is long, and no other."""
        if args.judge_step_timeout < 1:
            return asyncio.Event().wait()
        args.judge_step_timeout = 0.5
        return saying(PLACED)

    words = r"a sample within judge_step_timeout=0.5 s: 0 of 8 questions"
    with vllm_like(4096, silent) as (url, _), pytest.raises(JudgeError, match=words):
        args = settings(tmp_path, url, judge_concurrency=2, judge_step_timeout=60.0)
        check(args, queries)


# One mechanism


def test_preflight_only_shows_a_prompt_and_its_answer(tmp_path, rows, queries):
    request = json.dumps({"chat_template_kwargs": {"enable_thinking": False}, "seed": None})
    with vllm_like(4096, lambda: saying(f"Let\x1b[2J me see:\n{PLACED}")) as (url, asked):
        args = {"judge_concurrency": 1, "judge_request": request}
        shown = check(settings(tmp_path, url, preflight_only=True, **args), queries)
        plain = check(settings(tmp_path, url, **args), queries)
        bare = QueryTable(rows.remove_columns("responses"))
        made_up = check(settings(tmp_path, preflight_only=True, max_steps=40, method="pointwise"), bare)
    assert "so its rubrics and made-up sentences stand for rollouts):" in made_up
    assert "warning: each of the 8 questions of a sample has the same verdict, 1." in plain
    lists = check(settings(tmp_path, num_generations=4, method_args={"bootstrap": True}), queries)
    assert "same verdict" not in made_up + lists + check(settings(tmp_path), queries)
    assert "steps are few: our runs that learned took" in plain and "are few" not in made_up
    prompt = asked[0]["messages"][0]["content"]
    lines = ["the first prompt:", *(f"  | {line}" for line in prompt.splitlines())]
    lines += ["its answer:", r"  | Let\x1b[2J me see:", f"  | {PLACED}"]
    assert "\n".join(lines) in shown
    assert "prompt:" not in plain and prompt.splitlines()[-1] not in plain
    assert asked[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "seed" not in asked[0] and "temperature" in asked[0]


def test_run_stops_after_its_checks_without_a_gpu_or_a_policy(tmp_path, capsys, monkeypatch):
    """The settings are those of a machine with eight GPUs. Only the preflight asks the judge."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(command, "build_trainer", lambda *_: pytest.fail("a check loads no policy"))
    words = ["--config", "paper/rankbuffer.yaml", "--dataset_name", str(QUICKSTART / "howto.jsonl")]
    words += ["--output_dir", str(tmp_path / "run"), "--judge_model", "rubric-judge"]  # eight, as the recipe means
    said = {}
    for mode, topic in (("dry_run", "dry run"), ("preflight_only", "preflight")):
        with vllm_like(40_000) as (url, asked):
            command.run(*RecipeParser().parse_args_and_config([*words, "--judge_url", url, f"--{mode}", "true"]))
        lines = capsys.readouterr().out.splitlines()
        said[mode] = [line.removeprefix(f"[{topic}] ") for line in lines]
        assert f"[{topic}] processes: 8, planned for" in lines
        (cost,) = (line for line in said[mode] if line.startswith("the run: 80 groups of 8 rollouts, 640 to 960"))
        assert ("at this rate" in cost) == (mode == "preflight_only") == bool(asked)
    plan = said["dry_run"].index(next(line for line in said["dry_run"] if line.startswith("hub: "))) + 1
    assert said["dry_run"][1:8] == said["preflight_only"][1:8] and plan > 9
    assert not (tmp_path / "run").exists()
