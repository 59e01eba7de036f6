"""WildBench v2: its arithmetic against slow oracles, prompts, readers, and a judging over a real server."""

import json
import random
from collections import Counter
from dataclasses import replace

import pyarrow
import pytest
from helpers.evaluation_assets import Loopback, build, goodness, hostile_outputs, run_judge
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.parquet import write_table

from evaluation.assets import AssetError, Assets
from evaluation.benchmark import AROUND, OutputError, count_around
from evaluation.metric import weighted_mean
from evaluation.wildbench import prompts, scores
from evaluation.wildbench.benchmark import REFERENCES, WildBench
from evaluation.wildbench.scores import CUT, EMPTY, GROUP_WEIGHTS, REWARDS, Judged, groups_of, score_wildbench
from rankbuffer_trl.judge._verdicts import VerdictError
from rankbuffer_trl.judge.config import JudgeConfig

tags = st.lists(st.sampled_from(sorted(scores.GROUP_OF)), min_size=1, max_size=4)
ratings = st.builds(Judged, st.integers(1, 10).map(float), tags.map(groups_of), st.booleans())
rewards = st.builds(
    lambda value, groups, whole: Judged(value * whole, groups, whole),
    st.sampled_from(sorted(REWARDS.values())),
    tags.map(groups_of),
    st.booleans(),
)

# Arithmetic


def by_session(rows):
    return {str(place): row for place, row in enumerate(rows)}


def group_means(rows):
    """The mean of each group of tasks that has a whole row."""
    members = {g: [row.value for row in rows if g in row.groups and row.whole] for g in GROUP_WEIGHTS}
    return {group: sum(values) / len(values) for group, values in members.items() if values}


def macro(means):
    """The weighted mean over the groups that have a row."""
    total = sum(GROUP_WEIGHTS[group] for group in means)
    return sum(GROUP_WEIGHTS[group] * value for group, value in means.items()) / total


@given(st.lists(ratings, min_size=1, max_size=40))
def test_score_wildbench_spreads_ratings_and_weighs_the_groups(rows):
    scored = score_wildbench(by_session(rows), {}, len(rows) + 1)
    found = {name: weighted_mean(each) for name, each in scored.rows.items()}
    assert found["WB-Score"] == pytest.approx(sum((row.value - 5) * 20 for row in rows) / len(rows))
    groups = {group: (value - 5) * 20 for group, value in group_means(rows).items()}
    for group, score in groups.items():
        assert found[f"WB-Score: {group}"] == pytest.approx(score)
    assert {group for group in GROUP_WEIGHTS if scored.rows[f"WB-Score: {group}"]} == groups.keys()
    if groups:
        assert found["WB-Score (task macro)"] == pytest.approx(macro(groups))
    assert len(scored.rows["WB-Score (task macro)"]) == sum(row.whole for row in rows)
    assert scored.headline == "WB-Score (task macro)" and scored.counts["ratings dropped"] == 1


@given(st.lists(st.lists(rewards, min_size=1, max_size=40), min_size=1, max_size=3))
def test_score_wildbench_divides_rewards_by_all_rows_and_those_of_groups_by_whole_ones(references):
    scored = score_wildbench({}, {f"r{i}": by_session(rows) for i, rows in enumerate(references)}, 40)
    plain = []
    for i, rows in enumerate(references):
        counts = Counter(row.value for row in rows if row.whole)
        plain.append(100 * (counts[1.0] + counts[0.5] / 2 - counts[-0.5] / 2 - counts[-1.0]) / len(rows))
        assert weighted_mean(scored.rows[f"WB-Reward: r{i}"]) == pytest.approx(plain[-1], abs=1e-9)
    macros = [100 * macro(means) for means in map(group_means, references) if means]
    for name, each in (("WB-Reward", plain), ("WB-Reward (task macro)", macros)):
        if each:
            assert weighted_mean(scored.rows[name]) == pytest.approx(sum(each) / len(each), abs=1e-9)


@given(st.lists(st.tuples(ratings, ratings), min_size=2, max_size=40))
def test_minus_weighs_the_groups_by_the_prompts_of_both_models(pairs):
    pairs = [(one, replace(other, groups=one.groups)) for one, other in pairs]
    first, second = (score_wildbench(by_session(rows), {}, 40) for rows in zip(*pairs, strict=True))
    both = [pair for pair in pairs if pair[0].whole and pair[1].whole]
    if both:
        one, other = (macro(group_means(rows)) for rows in zip(*both, strict=True))
        found = second.minus(first, "WB-Score (task macro)")
        assert (found.value, found.n) == (pytest.approx(20 * (other - one), abs=1e-9), len(both))


def test_groups_of_counts_a_row_once_in_each_group_of_its_tags():
    assert list(GROUP_WEIGHTS.values()) == [0.5, 1.25, 1.0, 0.75, 1.25]
    assert groups_of(["Editing", "Math", "Creative Writing", "Math"]) == ("Creative Tasks", "Math & Data Analysis")
    with pytest.raises(ValueError, match=r"'Poetry' is none of WildBench v2's: Creative Writing, "):
        groups_of(["Math", "Poetry"])


def test_is_whole_takes_no_empty_and_no_cut_response():
    for text in ("fine", CUT + " no"):
        assert scores.is_whole(text), text
    for text in ("", " \n", EMPTY, "cut" + CUT + "\n"):
        assert not scores.is_whole(text), text


@given(st.text(alphabet="ab \n", max_size=30), st.integers(1, 6))
def test_shorten_cuts_after_so_many_words(text, most):
    short = scores.cut_words(text, most)
    if text.count(" ") < most:
        assert short == text
    else:
        kept = short.removesuffix(CUT)
        assert short == kept + CUT and text.startswith(kept + " ") and kept.count(" ") == most - 1


# Prompts

PLACEHOLDERS = ("{$history}", "{$user_query}", "{$model_output}", "{$candidate_A}", "{$candidate_B}", "{$checklist}")
SCORE = "H[{$history}] Q[{$user_query}] R[{$model_output}] C[{$checklist}]"
PAIR = "H[{$history}] Q[{$user_query}] A[{$candidate_A}] B[{$candidate_B}] C[{$checklist}]"


def conversation(*turns):
    spoken = tuple((("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns))
    return prompts.Conversation("s", spoken, ("Is it right?", "Is it short?"), ("Math",), groups_of(["Math"]))


@given(st.lists(st.sampled_from([*PLACEHOLDERS, "x {} $\\1"]), min_size=4, max_size=4))
def test_prompts_insert_each_text_and_placeholders_in_texts_stay_text(pieces):
    history, query, first, second = pieces
    asked = conversation(history, "ok", query)
    before, after = f"H[USER: {history}\n\nASSISTANT: ok\n\n] Q[{query}]", "C[- Is it right?\n- Is it short?\n]"
    assert prompts.scoring_prompt(SCORE, asked, first) == f"{before} R[{first}] {after}"
    assert prompts.pairwise_prompt(PAIR, asked, first, second) == f"{before} A[{first}] B[{second}] {after}"


def test_pairwise_prompt_is_cut_after_a_thousand_words_and_names_what_is_empty():
    thousand = " ".join(["w"] * 1000)
    long, blank = prompts.display(thousand + " w"), prompts.display(" \n")
    prompt = prompts.pairwise_prompt(PAIR, conversation(thousand + " w"), long, blank)
    assert f"Q[{thousand}{CUT}] A[{thousand}{CUT}] B[{EMPTY}]" in prompt
    assert prompts.display(thousand) == thousand
    assert f"H[USER: {thousand[2:]}{CUT}]" in prompts.pairwise_prompt(PAIR, conversation(thousand, "ok", "q"), "", "")


# Answers


def test_read_score_takes_a_number_from_1_to_10_as_the_tables_do():
    for score in ('"7"', "7", "7.5", '"7.5"', '" 10 "', "1"):
        verdict = prompts.read_score('<think>no {"score": "1"}</think>\n{"strengths": "{", "score": ' + score + "}\n")
        assert scores.rating(verdict) == float(score.strip('"')), score
    for score in ('"8/10"', "0", "11", '"nan"', "true", "null", "[7]", "NaN", "1e999", '"[7]"', "1" * 400):
        with pytest.raises(VerdictError, match="`score` must be a number from 1 to 10, not"):
            prompts.read_score('{"score": ' + score + "}")
    for answer in (
        "", "[" * 100_000, '{"score": 7, "why": "\\ud83d"}', "7", '{"score": "7"', '["score"]', '{"points": 7}',
        '{"score": 7} or {"score": 8}',
    ):  # fmt: skip
        with pytest.raises(VerdictError, match=r"not valid JSON|one whole JSON object with `score`"):
            prompts.read_score(answer)


def test_read_score_takes_and_marks_the_one_object_with_text_around_it():
    good = '{"strengths": "It shows {x} and </think>.", "score": 7}'
    marked = prompts.read_score(good) | {AROUND: True}
    for answer in (f"```json\n{good}\n```", f"Here: {good}", f"{good} So.", f"{good}<|im_end|>"):
        assert prompts.read_score(answer.replace("</think>", "")) == marked | {"strengths": "It shows {x} and ."}
    with pytest.raises(VerdictError, match="cut off before its verdict"):
        prompts.read_score('Perhaps {"score": 7}, or', cut_off=True)
    assert prompts.read_score('{"score": 7}}', cut_off=True)["score"] == 7
    rated = score_wildbench({}, {}, 3)
    assert count_around(rated, [marked, {"score": 1}, None, marked]).counts["verdicts with text around them"] == 2
    assert count_around(rated, [{"score": 1}, None]) == rated


def test_read_choice_takes_one_of_five():
    for choice in REWARDS:
        assert prompts.read_pairwise_choice(json.dumps({"choice": choice}))["choice"] == choice
    for choice in ("A", "B=A", "a+", ["A+"], 1):
        with pytest.raises(VerdictError, match=r"`choice` must be one of A\+\+, A\+, A=B, B\+, B\+\+, not"):
            prompts.read_pairwise_choice(json.dumps({"choice": choice}))


# All of it, over a real server


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Assets:
    folder = tmp_path_factory.mktemp("assets")
    return Assets(folder, build(folder))


@pytest.fixture(scope="module")
def bench(assets) -> WildBench:
    return WildBench(assets, reward=True)


def test_prompts_hold_every_turn_and_a_limit_keeps_the_positions(assets, bench):
    short, long = bench.prompts()[1::-1]
    assert [(m["role"], m["content"]) for m in long.messages] == [
        ("user", "Talk 0"), ("assistant", "Yes?"), ("user", "More 0"),
    ]  # fmt: skip
    assert short.messages == [{"role": "user", "content": "More 1"}]
    few = WildBench(assets, limit=5)
    assert [prompt.id for prompt in few.prompts()] == ["s0", "s1", "s2", "s3", "s4"]
    assert few.first == bench.first and few.references == {}


def test_outputs_have_the_official_format(bench, tmp_path):
    outputs = hostile_outputs(bench)
    bench.write_outputs(tmp_path, "org/mine", outputs)
    assert bench.read_outputs(tmp_path, "org/mine") == outputs
    path = tmp_path / "result_dirs" / "wild_bench_v2" / "org__mine.json"
    rows = json.loads(path.read_text())
    assert rows[0] == {
        "session_id": "s0", "chat_history": ["Talk 0", "Yes?", "More 0"], "model_input": "n/a",
        "output": [outputs["s0"]], "generator": "org/mine", "configs": {}, "dataset": "wild_bench",
        "primary_tag": "Coding & Debugging",
    }  # fmt: skip
    path.write_text(json.dumps([row | {"output": row["output"][0]} for row in rows]))
    assert bench.read_outputs(tmp_path, "org/mine") == outputs
    path.write_text(json.dumps({"rows": rows}))
    with pytest.raises(OutputError, match="must hold a list of outputs"):
        bench.read_outputs(tmp_path, "org/mine")


def test_judge_and_scores_end_to_end(bench, tmp_path):
    server, outputs = Loopback(), hostile_outputs(bench)  # s1 is empty, s2 too long for a pair
    cost = run_judge(bench, tmp_path, server, outputs)
    scored = bench.scores(tmp_path, "mine")
    groups = {session: conversation.groups for session, conversation in bench.conversations.items()}
    rated = {s: Judged(min(10, 1 + goodness(text)), groups[s], s != "s1") for s, text in outputs.items()}

    def reward(session: str, gap: int) -> Judged:
        if session in ("s1", "s2"):
            return Judged(0, groups[session], False)
        return Judged(((gap > 0) - (gap < 0)) * (1 if abs(gap) > 2 else 0.5), groups[session], True)

    rewards = {
        reference: {s: reward(s, goodness(text) - goodness(texts[s])) for s, text in outputs.items()}
        for reference, texts in bench.references.items()
    }
    assert scored == score_wildbench(rated, rewards, len(outputs))
    assert scored.counts[f"pairs with an empty or cut response: {REFERENCES[0]}"] == 2

    n = len(outputs)
    assert server.asked["judge"] == cost.attempts == cost.calls == (n - 1) + 3 * (n - 2)
    for body in server.bodies:
        assert (body["temperature"], body["max_tokens"]) == (0, 1024)
        assert body["response_format"] == {"type": "json_object"}
        assert [message["role"] for message in body["messages"]] == ["user"]

    random.seed(42)
    official = {session: random.random() < 0.5 for session in bench.conversations}
    rows = json.loads((tmp_path / "score.v2" / "mine.json").read_text())
    fixed = {"score": "1", "weaknesses": "There is no response, so no judge was asked."}
    row = {"session_id": "s1", "parsed_result": fixed, "model_test": "mine", "score": "1", "model_output": ""}
    assert rows[1] == row
    for reference in REFERENCES:
        rows = json.loads((tmp_path / "pairwise.v2" / f"ref={reference}" / "mine.json").read_text())
        assert {row["session_id"]: row["model_A"] == "mine" for row in rows} == official
        assert {row["winner"] for row in rows} <= {"mine", reference, "tie", None}
        assert rows[1]["model_outputs"]["mine"] == EMPTY
        assert rows[2]["model_outputs"]["mine"].endswith(CUT)
        assert [row["session_id"] for row in rows if row["winner"] is None] == ["s1", "s2"]


def test_judge_repeats_malformed_answers_then_drops_and_counts_them(assets, tmp_path):
    bench = WildBench(assets)
    answers = {"More 4": ["no", '{"score": "8/10"}', '{"score": 8}'], "More 5": ['{"strengths": "x"}'] * 3}

    def answer(body, text):
        query = next((q for q in answers if f"<Q>{q}</Q>" in body["messages"][0]["content"]), None)
        return answers[query].pop(0) if query else text

    server = Loopback(answer)
    cost = run_judge(bench, tmp_path, server)
    scored = bench.scores(tmp_path, "mine")
    assert (scored.counts["ratings dropped"], len(scored.rows["WB-Score"])) == (1, 11)
    assert scored.rows["WB-Score"]["s4"].value == 60
    assert "s5" not in scored.rows["WB-Score"]
    (repeat,) = [body for body in server.bodies if "8/10" in body["messages"][-1]["content"]]
    assert [message["role"] for message in repeat["messages"]] == ["user", "assistant", "user"]
    assert cost.attempts == 10 + 3 + 2, "what failed for good has its price, too"
    (cause,) = json.loads((tmp_path / "failures.json").read_text()).values()
    assert cause.startswith("malformed: the answer must hold one whole JSON object with `score`")

    answers["More 5"].append('{"score": 2}')
    run_judge(bench, tmp_path, server := Loopback(answer))
    assert server.asked["judge"] == 1
    assert bench.scores(tmp_path, "mine").rows["WB-Score"]["s5"].value == -60


def test_judge_refuses_a_model_that_is_called_like_a_reference(bench, tmp_path):
    config = JudgeConfig(judge_url="http://127.0.0.1:9/v1", judge_model="judge")
    with pytest.raises(OutputError, match="'claude-3-haiku-20240307' is the name of a WB-Reward reference"):
        bench.judge(tmp_path, "claude-3-haiku-20240307", config)


HI = [{"role": "assistant", "content": "Hi"}]
ROWS = {  # what is said of a wrong fourth row
    "row 3, is no row of WildBench v2 .*its id is 's9' and its session_id 's3'": {"id": "s9"},
    "row 3.*the session 's0' occurs twice": {"id": "s0", "session_id": "s0"},
    "row 3.*the tag 'Poetry' is none of WildBench v2's": {"primary_tag": "Poetry"},
    "row 3.*last turn is not the user's": {"conversation_input": HI},
    "row 3.*TypeError": {"checklist": None},
}


def test_readers_name_a_row_that_is_not_as_it_should_be_and_outputs_that_are_missing(assets, tmp_path):
    for fault, change in ROWS.items():
        rows = prompts.read_parquet(assets.path("wildbench", "questions"))
        rows[3] |= change
        write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
        with pytest.raises(AssetError, match=fault):
            prompts.read_conversations(tmp_path / "rows.parquet")
    path, torn = assets.path("wildbench", REFERENCES[0]), tmp_path / "torn.parquet"
    torn.write_bytes(path.read_bytes()[:-20])
    for file, sessions, fault in (
        (path, ["s0", "s99"], "lacks the outputs of 1 sessions: s99"),
        (torn, ["s0"], "is not a Parquet file"),
        (assets.path("wildbench", "questions"), ["s0"], "row 0, is no output of WildBench"),
    ):
        with pytest.raises(AssetError, match=fault):
            prompts.read_reference(file, sessions)


def test_reward_judged_is_0_where_the_tables_do_not_count_the_verdict():
    expected = {
        ("mine", 2, "a"): (1, True), ("theirs", 1, "a"): (-0.5, True), ("tie", 0, "a"): (0, True),
        ("mine", 2, ""): (0, False), (None, None, CUT): (0, False),
    }  # fmt: skip
    rows = [
        {"session_id": str(i), "winner": winner, "extent": extent, "model_outputs": {"mine": text, "theirs": "b"}}
        for i, (winner, extent, text) in enumerate(expected)
    ]
    judged = scores.reward_judged(rows, "theirs", {str(i): () for i in range(len(rows))})
    assert [(one.value, one.whole) for one in judged.values()] == [*expected.values()]
