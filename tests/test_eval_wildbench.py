"""WildBench v2: its arithmetic against slow oracles, prompts, readers, and all of it over a real server."""

import json
import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation.metric import mean
from evaluation.wildbench_prompts import (
    Conversation,
    display,
    pairwise_prompt,
    positions,
    rating,
    read_choice,
    read_score,
    scoring_prompt,
)
from evaluation.wildbench_scores import (
    CUT,
    EMPTY,
    GROUP_OF,
    GROUP_WEIGHTS,
    REWARDS,
    Judged,
    group_rewards,
    group_rows,
    group_scores,
    groups_of,
    is_whole,
    macro,
    macro_rows,
    plain_reward,
    plain_rows,
    plain_score,
    shorten,
    spread,
    together,
)
from rankbuffer_trl.judge.verdicts import VerdictError

tags = st.lists(st.sampled_from(sorted(GROUP_OF)), min_size=1, max_size=4)
ratings = st.builds(Judged, st.integers(1, 10).map(float), tags.map(groups_of), st.booleans())
rewards = st.builds(
    lambda value, groups, whole: Judged(value * whole, groups, whole),
    st.sampled_from(sorted(REWARDS.values())),
    tags.map(groups_of),
    st.booleans(),
)

# Arithmetic


@given(st.lists(ratings, min_size=1, max_size=40))
def test_wb_score_is_the_spread_mean_and_the_macro_its_mean_over_groups(rows):
    assert plain_score(rows) == pytest.approx(sum((row.value - 5) * 20 for row in rows) / len(rows))
    total = 0.0
    for group, weight in GROUP_WEIGHTS.items():
        members = [row.value for row in rows if group in row.groups and row.whole]
        if members:
            total += weight * (sum(members) / len(members) - 5) * 2
    assert macro(group_scores(rows)) == pytest.approx(total / 4.75)


@given(st.lists(rewards, min_size=1, max_size=40))
def test_wb_reward_divides_by_all_rows_and_its_groups_by_whole_ones(rows):
    counts = Counter(row.value for row in rows if row.whole)
    assert plain_reward(rows) == (counts[1.0] + counts[0.5] / 2 - counts[-0.5] / 2 - counts[-1.0]) / len(rows)
    for group, reward in group_rewards(rows).items():
        members = [row.value for row in rows if row.whole and group in row.groups]
        assert reward == pytest.approx(sum(members) / len(members))


@given(st.dictionaries(st.integers(0, 99), ratings, min_size=1, max_size=40))
def test_rows_have_the_tables_means(judged):
    every = list(judged.values())
    assert spread(mean(plain_rows(judged))) * 10 == pytest.approx(plain_score(every))
    groups = group_scores(every)
    rows = macro_rows(judged)
    assert rows.keys() == {key for key, row in judged.items() if row.whole}
    if groups:
        present = sum(GROUP_WEIGHTS[group] for group in groups)
        assert spread(mean(rows)) == pytest.approx(macro(groups) * 4.75 / present)
    for group, score in groups.items():
        assert spread(mean(group_rows(judged, group))) == pytest.approx(score)


@given(st.lists(st.dictionaries(st.integers(0, 9), rewards, min_size=1), min_size=1, max_size=3))
def test_references_together_count_the_same(judged):
    for rows_of in (plain_rows, macro_rows):
        each = [rows for rows in map(rows_of, judged) if rows]
        if each:
            assert mean(together(each)) == pytest.approx(sum(map(mean, each)) / len(each), abs=1e-9)


def test_a_row_counts_once_in_each_group_of_its_tags():
    assert groups_of(["Editing", "Math", "Creative Writing", "Math"]) == ("Creative Tasks", "Math & Data Analysis")
    with pytest.raises(ValueError, match=r"'Poetry' is none of WildBench v2's: Creative Writing, "):
        groups_of(["Math", "Poetry"])


@pytest.mark.parametrize(
    ("text", "whole"),
    [("fine", True), ("", False), (" \n", False), (EMPTY, False), ("cut" + CUT + "\n", False), (CUT + " no", True)],
)
def test_only_whole_responses_count_in_a_group(text, whole):
    assert is_whole(text) == whole


@given(st.text(alphabet="ab \n", max_size=30), st.integers(1, 6))
def test_a_text_is_cut_after_so_many_words(text, most):
    short = shorten(text, most)
    if text.count(" ") < most:
        assert short == text
    else:
        assert short.endswith(CUT)
        kept = short.removesuffix(CUT)
        assert text.startswith(kept + " ")
        assert kept.count(" ") == most - 1


# Prompts

SCORE = "H[{$history}] Q[{$user_query}] R[{$model_output}] C[{$checklist}]"
PAIR = "H[{$history}] Q[{$user_query}] A[{$candidate_A}] B[{$candidate_B}] C[{$checklist}]"
PLACEHOLDERS = ("{$history}", "{$user_query}", "{$model_output}", "{$candidate_A}", "{$candidate_B}", "{$checklist}")


def conversation(*turns, checklist=("Is it right?", "Is it short?")):
    roles = ("user", "assistant")
    spoken = tuple((roles[i % 2], turn) for i, turn in enumerate(turns))
    return Conversation("s", spoken, tuple(checklist), ("Math",), groups_of(["Math"]))


def test_a_scoring_prompt_shows_history_query_response_and_checklist():
    asked = conversation("Hello", "Hi", "2 + 2?")
    assert scoring_prompt(SCORE, asked, "4") == (
        "H[USER: Hello\n\nASSISTANT: Hi\n\n] Q[2 + 2?] R[4] C[- Is it right?\n- Is it short?\n]"
    )


texts = st.text(alphabet="ab {}$\\1", max_size=12)


@given(texts, texts, texts)
def test_without_placeholders_in_texts_one_pass_equals_the_official_replacements(history, query, response):
    asked = conversation(history, "ok", query)
    slow = SCORE
    for name, text in zip(PLACEHOLDERS[:3], (asked.history, query, response), strict=True):
        slow = slow.replace(name, text)
    assert scoring_prompt(SCORE, asked, response) == slow.replace("{$checklist}", asked.criteria)


@given(st.lists(st.sampled_from([*PLACEHOLDERS, "x"]), min_size=4, max_size=4))
def test_placeholders_in_texts_stay_text(pieces):
    history, query, first, second = pieces
    asked = conversation(history, "ok", query)
    assert pairwise_prompt(PAIR, asked, first, second) == (
        f"H[USER: {history}\n\nASSISTANT: ok\n\n] Q[{query}] A[{first}] B[{second}] C[{asked.criteria}]"
    )


def test_a_pairwise_prompt_is_cut_after_a_thousand_words_and_names_what_is_empty():
    words = " ".join(["w"] * 1001)
    prompt = pairwise_prompt(PAIR, conversation(words), display(words), display(" \n"))
    assert f"Q[{' '.join(['w'] * 1000)}{CUT}]" in prompt
    assert f"A[{' '.join(['w'] * 1000)}{CUT}]" in prompt
    assert f"B[{EMPTY}]" in prompt
    assert display(" ".join(["w"] * 1000)).endswith("w")


def test_positions_are_one_toss_a_row_from_the_official_seed():
    random.seed(42)
    official = [random.random() < 0.5 for _ in range(50)]
    tossed = positions(42, [str(i) for i in range(50)])
    assert list(tossed.values()) == official
    assert positions(42, list(map(str, range(7)))) == dict(list(tossed.items())[:7])


# Answers


@pytest.mark.parametrize("score", ['"7"', "7", "7.5", '"7.5"', '" 10 "', "1"])
def test_a_score_is_read_as_the_tables_read_it(score):
    verdict = read_score('<think>no {"score": "1"}</think>\n{"strengths": "{", "score": ' + score + "}\n")
    assert rating(verdict) == float(score.strip('"'))


@pytest.mark.parametrize(
    "score", ['"8/10"', "0", "11", '"nan"', "true", "null", "[7]", "NaN", "1e999", '"[7]"', "1" * 400]
)
def test_a_score_that_is_no_number_from_1_to_10_is_refused(score):
    with pytest.raises(VerdictError, match="`score` must be a number from 1 to 10, not"):
        read_score('{"score": ' + score + "}")


@pytest.mark.parametrize(
    "answer", ["", "7", '{"score": "7"', '["score"]', '{"points": 7}', '```json\n{"score": 7}\n```']
)
def test_an_answer_that_is_no_object_with_a_score_is_refused(answer):
    with pytest.raises(VerdictError, match=r"not valid JSON|one JSON object with the key `score`"):
        read_score(answer)


def test_a_choice_is_one_of_five():
    for choice in REWARDS:
        assert read_choice(json.dumps({"choice": choice}))["choice"] == choice
    for choice in ("A", "B=A", "a+", ["A+"], 1):
        with pytest.raises(VerdictError, match=r"`choice` must be one of A\+\+, A\+, A=B, B\+, B\+\+, not"):
            read_choice(json.dumps({"choice": choice}))


@given(st.text(max_size=40))
def test_no_text_breaks_a_reader(answer):
    for read in (read_score, read_choice):
        with suppress(VerdictError):
            assert isinstance(read(answer), dict)
