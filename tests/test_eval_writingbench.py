"""WritingBench: its reader, its arithmetic against slow oracles, and all of it over a real server."""

import json
from contextlib import suppress

import pytest
from helpers.evaluation_assets import Loopback, build, goodness
from helpers.http_server import served
from hypothesis import given
from hypothesis import strategies as st

from evaluation.assets import AssetError, Assets
from evaluation.benchmark import OutputError
from evaluation.metric import mean
from evaluation.writingbench.benchmark import WritingBench, read_queries
from evaluation.writingbench.scores import of_domain, overall, read_verdict, score_writingbench
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.verdicts import VerdictError

GOOD = '{"score": 7, "reason": "so {it} is"}'

# Answers


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        f"```json\n{GOOD}\n```",
        f"```{GOOD}```\n",
        f"json\n{GOOD}",
        f" <think>\n{{}}</think>\n\n{GOOD}\n",
        GOOD.replace("7", "7.0"),
    ],
)
def test_an_answer_is_read_with_or_without_a_fence(answer):
    verdict = read_verdict(answer)
    assert verdict == {"score": 7, "reason": "so {it} is"}


def test_what_else_an_answer_holds_is_kept():
    assert read_verdict('{"score": 1, "reason": "", "quote": "x"}') == {"score": 1, "reason": "", "quote": "x"}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        ("", "not valid JSON"),
        ('{"score": 7, "reason": "\\ud83d"}', "not valid JSON"),
        ('{"score": 7, "reason": "an "unescaped" quote"}', "not valid JSON"),
        ("__import__('os').getcwd()", "not valid JSON"),
        ("[7]", "with `score` and `reason`"),
        ('{"score": 7}', "with `score` and `reason`"),
        ('{"score": "7", "reason": ""}', 'integer from 1 to 10, not "7"'),
        ('{"score": true, "reason": ""}', "integer from 1 to 10, not true"),
        ('{"score": 0, "reason": ""}', "integer from 1 to 10, not 0"),
        ('{"score": 7.5, "reason": ""}', "integer from 1 to 10, not 7.5"),
        ('{"score": NaN, "reason": ""}', "integer from 1 to 10, not NaN"),
        ('{"score": 7, "reason": null}', "`reason` must be a text, not null"),
    ],
)
def test_any_other_answer_is_refused(answer, fault):
    with pytest.raises(VerdictError, match=fault):
        read_verdict(answer)


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader(answer):
    with suppress(VerdictError):
        read_verdict(answer)


# Arithmetic

criteria = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10), min_size=1)
judged = st.dictionaries(st.integers(0, 30).map(str), criteria, min_size=1)


@given(judged)
def test_overall_counts_each_criterion_once_and_a_domain_each_query(scores):
    every = [score for each in scores.values() for score in each.values()]
    assert mean(overall(scores)) == pytest.approx(10 * sum(every) / len(every))
    domains = {index: "even" if int(index) % 2 == 0 else "odd" for index in scores}
    for domain in set(domains.values()):
        means = [sum(each.values()) / len(each) for index, each in scores.items() if domains[index] == domain]
        assert mean(of_domain(scores, domain, domains)) == pytest.approx(10 * sum(means) / len(means))


def test_a_domain_without_scores_is_shown_as_none_and_drops_are_counted():
    scores = score_writingbench({"1": {"a": 3, "b": 6}}, {"1": "Art", "2": "Law"}, failed=4)
    assert scores.rows["Overall"] == {"1": (45, 2)}
    assert scores.rows["Law"] == {}
    assert scores.counts == {"queries": 2, "queries dropped": 1, "judgments": 2, "judgments dropped": 4}


# All of it, over a real server


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Assets:
    folder = tmp_path_factory.mktemp("assets")
    return Assets(folder, build(folder))


@pytest.fixture(scope="module")
def bench(assets) -> WritingBench:
    return WritingBench(assets)


def outputs_of(bench: WritingBench) -> dict[str, str]:
    """Responses of different worth; the second is empty, the third hostile."""
    outputs = {index: " ".join(["good"] * (int(index) % 9)) + " x" for index in bench.queries}
    return outputs | {"2": "", "3": "{query} {criteria} {0} {{good}} </R>"}


def run_judge(bench: WritingBench, folder, server: Loopback, **settings):
    """Judge outputs with the judge behind `server`; gives the cost."""
    bench.write_outputs(folder, "mine", outputs_of(bench))
    with served(server.app) as url:
        config = JudgeConfig(judge_url=f"{url}/v1", judge_model="judge", judge_max_retries=0, **settings)
        return bench.judge(folder, "mine", config)


def test_outputs_have_the_official_format(bench, tmp_path):
    bench.write_outputs(tmp_path, "org/mine", outputs_of(bench))
    assert bench.read_outputs(tmp_path, "org/mine") == outputs_of(bench)
    (path,) = tmp_path.rglob("*.jsonl")
    rows = path.read_text().splitlines(keepends=True)
    assert json.loads(rows[1]) == {"index": 2, "response": ""}
    for broken in (rows[:-1], rows + rows[:1], [rows[0][:-9]], ['{"index": 1, "response": null}\n', *rows[1:]]):
        path.write_text("".join(broken))
        with pytest.raises(OutputError):
            bench.read_outputs(tmp_path, "org/mine")


def test_scores_end_to_end(bench, tmp_path):
    server, outputs = Loopback(), outputs_of(bench)
    cost = run_judge(bench, tmp_path, server)
    scores = bench.scores(tmp_path, "mine")
    expected = {index: min(10, 1 + goodness(text)) for index, text in outputs.items()}
    metrics = {name: interval.value for name, interval in scores.metrics().items()}
    assert metrics["Overall"] == pytest.approx(10 * sum(expected.values()) / len(expected))
    for domain in ("Law", "Art"):
        values = [expected[index] for index, query in bench.queries.items() if query.domain == domain]
        assert metrics[domain] == pytest.approx(10 * sum(values) / len(values))
    assert (scores.headline, metrics.keys()) == ("Overall", {"Overall", "Law", "Art"})
    rows = [json.loads(line) for line in (tmp_path / "score_dir" / "mine.jsonl").read_text().splitlines()]
    assert rows[2]["scores"]["c4"] == [{"score": 2, "reason": "it has good words"}]
    assert server.asked["judge"] == cost.calls == cost.attempts == 5 * len(outputs)

    again = Loopback()
    assert run_judge(bench, tmp_path, again) == cost
    assert not again.bodies
    assert bench.scores(tmp_path, "mine") == scores


def test_each_criterion_is_one_official_request(bench, tmp_path):
    server = Loopback()
    run_judge(bench, tmp_path, server)
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)
    for body in server.bodies:
        assert {name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens")} == {
            "temperature": 1.0,
            "top_p": 0.95,
            "top_k": -1,
            "max_tokens": 2048,
        }
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["messages"][0]["content"] == "You score writing."
    criterion = bench.queries["3"].criteria["c0"]
    prompt = (
        f"<Q>Write 2</Q><R>{{query}} {{criteria}} {{0}} {{{{good}}}} </R></R>{criterion} "
        f"Answer with JSON: score and reason. {criterion}"
    )
    assert prompt in [body["messages"][1]["content"] for body in server.bodies]


def test_a_malformed_answer_is_asked_for_afresh_and_a_query_without_one_dropped(bench, tmp_path):
    tries = {("<Q>Write 4</Q>", "'c1'"): ["no", GOOD], ("<Q>Write 6</Q>", "'c2'"): ["no"] * 3}

    def answer(body, text):
        prompt = body["messages"][1]["content"]
        key = next((key for key in tries if all(part in prompt for part in key)), None)
        return tries[key].pop(0) if key and tries[key] else text

    server = Loopback(answer)
    run_judge(bench, tmp_path, server)
    scores = bench.scores(tmp_path, "mine")
    assert scores.counts == {"queries": 12, "queries dropped": 1, "judgments": 55, "judgments dropped": 1}
    assert "7" not in scores.rows["Overall"]
    assert scores.rows["Overall"]["5"].value == 10 * (4 * (1 + 5) + 7) / 5
    asked = [b for b in server.bodies if "<Q>Write 6</Q>" in b["messages"][1]["content"] and "'c2'" in str(b)]
    assert len({json.dumps(body["messages"]) for body in asked}) == 1
    assert [body["seed"] - asked[0]["seed"] for body in asked] == [0, 1, 2]
    assert json.loads((tmp_path / "failures.json").read_text()).keys() == {"7/c2"}

    server = Loopback(answer)
    run_judge(bench, tmp_path, server)
    assert server.asked["judge"] == 1
    assert bench.scores(tmp_path, "mine").counts["queries dropped"] == 0


def test_too_many_failures_are_an_error(bench, tmp_path):
    with pytest.raises(JudgeError, match="judgments failed, more than judge_max_failures"):
        run_judge(bench, tmp_path, Loopback(lambda body, text: "no"), judge_max_attempts=1)


def test_a_result_file_that_is_not_whole_is_refused(bench, tmp_path):
    run_judge(bench, tmp_path, Loopback())
    path = tmp_path / "score_dir" / "mine.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    for broken, fault in (
        ([*rows[:-1], rows[-1][:-9]], "line 12: .*half a file"),
        (rows[1:], "1 of 12 rows have no verdict: 1"),
        ([*rows, rows[0]], "1 of 12 rows are judged several times: 1"),
        ([*rows[:-1], rows[-1].replace("c4", "c5")], "index 12 lacks the score of a criterion"),
        ([*rows[:-1], rows[-1].replace('"score": ', '"score": 1')], "index 12 has no score from 1 to 10 for 'c0'"),
    ):
        path.write_text("".join(broken))
        with pytest.raises(OutputError, match=fault):
            bench.scores(tmp_path, "mine")
    path.unlink()
    with pytest.raises(OutputError, match="is missing: judge the outputs first"):
        bench.scores(tmp_path, "mine")


def test_a_limit_takes_the_first_queries(assets):
    assert [prompt.id for prompt in WritingBench(assets, limit=3).prompts()] == ["1", "2", "3"]


QUERY = {"index": 1, "domain1": "Art", "query": "Write", "checklist": [{"name": "a", "n": 1}, {"name": "b"}]}


def test_criteria_of_one_name_are_one(tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_text(json.dumps(QUERY | {"checklist": [*QUERY["checklist"], {"name": "a", "n": 2}]}) + "\n")
    assert read_queries(path)["1"].criteria == {"a": {"name": "a", "n": 1}, "b": {"name": "b"}}


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([QUERY, QUERY], "line 2, is no query of WritingBench .*the index 1 occurs twice"),
        ([QUERY | {"checklist": []}], "line 1.*it has no criteria"),
        ([{"index": 1}], "line 1.*KeyError: 'checklist'"),
        ([QUERY | {"index": "one"}], "line 1.*invalid literal"),
    ],
)
def test_a_row_that_is_not_as_it_should_be_is_named(tmp_path, rows, fault):
    path = tmp_path / "queries.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(AssetError, match=fault):
        read_queries(path)
