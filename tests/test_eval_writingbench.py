"""WritingBench: its reader, its arithmetic against slow oracles, and a judging over a real server."""

import json

import pytest
from helpers.evaluation_assets import Loopback, build, goodness, hostile_outputs, jsonl, run_judge
from hypothesis import given
from hypothesis import strategies as st

from evaluation.assets import AssetError, Assets
from evaluation.benchmark import AROUND
from evaluation.metric import weighted_mean
from evaluation.writingbench.benchmark import WritingBench, read_queries
from evaluation.writingbench.scores import of_domain, overall, read_verdict, score_writingbench
from rankbuffer_trl.judge._verdicts import VerdictError

GOOD = '{"score": 7, "reason": "so {it} is"}'


def test_read_verdict_takes_an_answer_with_or_without_a_fence():
    fences = ("{}", "```json\n{}\n```", "```{}```\n", "json\n{}", " <think>\n{{}}</think>\n\n{}\n")
    for answer in (*(fence.replace("{}", GOOD) for fence in fences), GOOD.replace("7", "7.0")):
        assert read_verdict(answer) == {"score": 7, "reason": "so {it} is"}, answer
    for around in ("So: {}", "{}</s>", "Scored.\n```json\n{}\n```\nThat is all."):
        assert read_verdict(around.replace("{}", GOOD)) == {"score": 7, "reason": "so {it} is", AROUND: True}
    with pytest.raises(VerdictError, match="cut off"):
        read_verdict(f"Perhaps {GOOD}, or", cut_off=True)
    assert read_verdict('{"score": 1, "reason": "", "quote": "x"}') == {"score": 1, "reason": "", "quote": "x"}


def test_read_verdict_refuses_any_other_answer():
    for answer, fault in (
        *((answer, "not valid JSON") for answer in ("", "[" * 100_000, "__import__('os').getcwd()")),
        *((f'{{"score": 7, "reason": "{text}"}}', "not valid JSON") for text in ("\\ud83d", 'an "unescaped" quote')),
        *((answer, "with `score` and `reason`") for answer in ("[7]", '{"score": 7}')),
        *((f'{{"score": {n}, "reason": ""}}', f"from 1 to 10, not {n}") for n in '"7" true 0 7.5 NaN'.split()),
        ('{"score": 7, "reason": null}', "`reason` must be a text, not null"),
    ):
        with pytest.raises(VerdictError, match=fault):
            read_verdict(answer)


criteria = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10), min_size=1)


@given(st.dictionaries(st.integers(0, 30).map(str), criteria, min_size=1))
def test_overall_counts_each_criterion_once_and_a_domain_each_query(scores):
    every = [score for each in scores.values() for score in each.values()]
    assert weighted_mean(overall(scores)) == pytest.approx(10 * sum(every) / len(every))
    domains = {index: "even" if int(index) % 2 == 0 else "odd" for index in scores}
    for domain in set(domains.values()):
        means = [sum(each.values()) / len(each) for index, each in scores.items() if domains[index] == domain]
        assert weighted_mean(of_domain(scores, domain, domains)) == pytest.approx(10 * sum(means) / len(means))


def test_score_writingbench_shows_a_domain_without_scores_and_counts_drops():
    scores = score_writingbench({"1": {"a": 3, "b": 6}}, {"1": "Art", "2": "Law"}, failed=4)
    assert scores.rows["Overall"] == {"1": (45, 2)}
    assert scores.rows["Law"] == {}
    assert scores.counts == {"queries": 2, "queries dropped": 1, "judgments": 2, "judgments dropped": 4}


# All of it, over a real server


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> WritingBench:
    folder = tmp_path_factory.mktemp("assets")
    return WritingBench(Assets(folder, build(folder)))


def test_judge_and_scores_end_to_end(bench, tmp_path):
    server, outputs = Loopback(), hostile_outputs(bench)
    cost = run_judge(bench, tmp_path, server, outputs)
    assert (tmp_path / "responses" / "mine.jsonl").read_text().splitlines()[1] == '{"index": 2, "response": " \\n"}'
    scores = bench.scores(tmp_path, "mine")
    points = {i: dict.fromkeys(bench.queries[i].criteria, min(10, 1 + goodness(text))) for i, text in outputs.items()}
    domains = {index: query.domain for index, query in bench.queries.items()}
    assert scores == score_writingbench(points, domains, 0)
    assert (scores.headline, list(scores.rows)) == ("Overall", ["Overall", "Art", "Law"])
    rows = [json.loads(line) for line in (tmp_path / "score_dir" / "mine.jsonl").read_text().splitlines()]
    assert rows[3]["scores"]["c4"] == [{"score": 3, "reason": "it has good words"}]

    assert server.asked["judge"] == cost.calls == cost.attempts == 5 * len(outputs)
    assert len({body["seed"] for body in server.bodies}) == len(server.bodies)
    request = {"temperature": 1.0, "top_p": 0.95, "top_k": -1, "max_tokens": 2048}
    for body in server.bodies:
        assert {name: body[name] for name in request} == request
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
        assert body["messages"][0]["content"] == "You score writing."
    criterion = bench.queries["4"].criteria["c0"]
    prompt = f"<Q>Write 3</Q><R>{outputs['4']}</R>{criterion} Answer with JSON: score and reason. {criterion}"
    assert prompt in [body["messages"][1]["content"] for body in server.bodies]


def test_judge_asks_for_a_malformed_answer_afresh_and_drops_a_query_without_one(bench, tmp_path):
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
    assert scores.rows["Overall"]["5"].value == 10 * (4 * (1 + 4) + 7) / 5
    asked = [b for b in server.bodies if "<Q>Write 6</Q>" in b["messages"][1]["content"] and "'c2'" in str(b)]
    assert len({json.dumps(body["messages"]) for body in asked}) == 1
    assert [body["seed"] - asked[0]["seed"] for body in asked] == [0, 1, 2]
    assert json.loads((tmp_path / "failures.json").read_text()).keys() == {"7/c2"}

    again = Loopback(answer)
    cost = run_judge(bench, tmp_path, again)
    assert again.asked["judge"] == 1 and cost.failures == 1
    assert cost.attempts == server.asked["judge"] + 1, "those that failed before were paid for, too"
    assert bench.scores(tmp_path, "mine").counts["queries dropped"] == 0


QUERY = {"index": 1, "domain1": "Art", "query": "Write", "checklist": [{"name": "a", "n": 1}, {"name": "b"}]}


def test_read_queries_takes_criteria_of_one_name_as_one_and_names_a_wrong_row(tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_text(jsonl([QUERY | {"checklist": [*QUERY["checklist"], {"name": "a", "n": 2}]}]))
    assert read_queries(path)["1"].criteria == {"a": {"name": "a", "n": 1}, "b": {"name": "b"}}
    for rows, fault in (
        ([QUERY, QUERY], "line 2, is no query of WritingBench .*the index 1 occurs twice"),
        ([QUERY | {"checklist": []}], "line 1.*it has no criteria"),
        ([{"index": 1}], "line 1.*KeyError: 'checklist'"),
        ([QUERY | {"index": "one"}], "line 1.*invalid literal"),
    ):
        path.write_text(jsonl(rows))
        with pytest.raises(AssetError, match=fault):
            read_queries(path)
