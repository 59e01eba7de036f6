"""Arithmetic against slow oracles: means, intervals, AlpacaEval's preferences, Arena-Hard's verdicts."""

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.alpaca_eval.scores import read_pilot_preference, read_preference, win_rate_rows
from evaluation.arena_hard.benchmark import read_judgment
from evaluation.arena_hard.scores import BATTLE_SCORES, battles, official_bootstrap, read_label, score_judgments
from evaluation.files import write_jsonl
from evaluation.metric import Row, bootstrap_interval, paired_difference, weighted_mean
from evaluation.official import ScriptError, run_official
from evaluation.results import format_interval
from rankbuffer_trl.judge._verdicts import VerdictError

rows = st.dictionaries(
    st.integers(0, 50).map(str), st.builds(Row, st.floats(-100, 100), st.floats(0.1, 6)), min_size=2, max_size=30
)


@settings(max_examples=25)
@given(rows)
def test_bootstrap_interval_is_about_the_weighted_mean(rows):
    copies = [row.value for row in rows.values() for _ in range(round(row.weight * 1000))]
    assert weighted_mean(rows) == pytest.approx(sum(copies) / len(copies), abs=0.2)
    found = bootstrap_interval(rows)
    assert min(row.value for row in rows.values()) - 1e-9 <= found.low <= found.high
    assert found.high <= max(row.value for row in rows.values()) + 1e-9
    assert (found.value, found.n) == (weighted_mean(rows), len(rows))
    assert bootstrap_interval(rows) == found, "the same seed gives the same interval"


def test_bootstrap_interval_has_the_width_of_the_normal_one_and_none_for_few_rows():
    rng = random.Random(1)
    sample = [rng.gauss(0, 5) for _ in range(400)]
    found = bootstrap_interval({str(i): Row(x) for i, x in enumerate(sample)})
    middle = sum(sample) / 400
    error = math.sqrt(sum((x - middle) ** 2 for x in sample) / 399 / 400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert found.low + found.high == pytest.approx(2 * middle, abs=0.1)
    one, other = {"a": Row(1.0)}, {"b": Row(1.0)}
    assert math.isnan(weighted_mean({})) and math.isnan(paired_difference(one, other).value)
    for few in (bootstrap_interval(one), paired_difference(one, one)):
        assert math.isnan(few.low) and math.isnan(few.high) and few.n == 1
    assert [format_interval(each) for each in (few, paired_difference(one, other))] == ["0.00", "-"]


@settings(max_examples=25)
@given(rows, st.floats(-5, 5))
def test_paired_difference_finds_a_shift_exactly(first, shift):
    second = {key: Row(row.value + shift, row.weight) for key, row in first.items()} | {"alone": Row(0.0)}
    found = paired_difference(first, second)
    assert found.n == len(first)
    for number in found[:3]:
        assert number == pytest.approx(shift, abs=1e-6)
    assert paired_difference(second, first).value == pytest.approx(-found.value, abs=1e-9)


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.just(math.nan), st.floats(1, 2), st.just(0))))
def test_win_rate_rows_leave_out_what_has_no_preference(preferences):
    known = [p for p in preferences.values() if p is not None and not math.isnan(p)]
    found = win_rate_rows(preferences)
    assert len(found) == len(known)
    if known:
        assert weighted_mean(found) == pytest.approx(sum(50 if p == 0 else 100 * (p - 1) for p in known) / len(known))


def answer(*tokens: tuple[str, float]) -> dict:
    top = [{"token": token, "logprob": value} for token, value in tokens]
    return {"content": [{"token": tokens[0][0], "top_logprobs": top}]}


@given(st.floats(-50, 0), st.floats(-50, 0), st.booleans())
def test_read_preference_is_the_models_share_of_the_two_tokens(m, M, switched):
    share = math.exp(m if switched else M) / (math.exp(m) + math.exp(M))
    found = read_preference(answer(("x", -1.0), ("M", M), ("m", m)), switched)
    assert found == pytest.approx(1 + share)
    assert read_pilot_preference(answer(("x", -1.0), ("M", M), ("m", m)), switched) == found


def test_read_preference_takes_no_share_from_a_token_that_is_not_among_the_likeliest():
    assert read_preference(answer(("m", -0.1), ("x", math.nan)), switched=False) == 1
    assert read_preference(answer(("m", -0.1), ("M", -math.inf)), switched=True) == 2
    assert read_preference(answer(("M", -9999.0), ("m", -1.0)), switched=True) == 2
    assert read_preference(answer(("Both", -0.1)), switched=True) is None
    with pytest.raises(VerdictError, match="it said 'Both'"):
        read_pilot_preference(answer(("Both", -0.1)), switched=True)


def test_read_preference_refuses_an_answer_without_log_probabilities():
    for logprobs in (None, {}, {"content": None}, {"content": []}, {"content": [{}]}, [1], "m"):
        for read in (read_preference, read_pilot_preference):
            with pytest.raises(VerdictError, match="returns no logprobs"):
                read(logprobs, True)
    for value in (math.inf, math.nan):
        for tokens in ((("m", value), ("M", -1.0)), (("M", value), ("x", -1.0))):
            with pytest.raises(VerdictError, match=f"the log probability {value} for"):
                read_preference(answer(*tokens), switched=True)


# Arena-Hard

label = st.text("ABab<>=[] \n", max_size=6)
texts = st.lists(st.one_of(label.map("[[{}]]".format), label.map("[{}]".format), label)).map(" ".join)


def official_label(judgment: str) -> str | None:
    """As the specification has it: upper case, the first pattern that matches at all, its last match."""
    for opening, closing in (("[[", "]]"), ("[", "]")):
        found, text = [], judgment.upper()
        for start in range(len(text)):
            rest = text[start:]
            if rest.startswith(opening):
                inner = re.match(r"[AB<>=]+", rest[len(opening) :])
                if inner and rest[len(opening) + inner.end() :].startswith(closing):
                    found.append(inner.group())
        if found:
            return found[-1]
    return None


@given(texts)
def test_read_label_is_the_last_match_of_the_first_pattern(text):
    assert read_label(text, [r"\[\[([AB<>=]+)\]\]", r"\[([AB<>=]+)\]"]) == official_label(text)


def test_read_judgment_takes_no_label_of_a_thought_that_was_cut_off():
    for text, cut_off, label in (
        ("My verdict could be [[A>B]], or", True, None),
        ("My verdict could be [[A>B]], or", False, "A>B"),
        ("[[A>B]]?</think>So it is [[B>A]], as", True, "B>A"),
        ("[[A>B]]?</think>So", True, None),
    ):
        assert read_judgment(text, cut_off, patterns=[r"\[\[([AB<>=]+)\]\]"]) == {"score": label, "answer": text}


@given(st.sampled_from(sorted(BATTLE_SCORES)), st.sampled_from(sorted(BATTLE_SCORES)))
def test_battles_say_the_same_of_mirrored_labels_and_swapped_places(first, second):
    backwards = "".join({">": "<", "<": ">"}.get(c, c) for c in reversed(first))
    assert BATTLE_SCORES[backwards] == BATTLE_SCORES[first]
    swapped = "".join({"A": "B", "B": "A"}.get(c, c) for c in first)
    assert BATTLE_SCORES[swapped] == [1 - score for score in BATTLE_SCORES[first]]
    games = [{"score": first}, {"score": second}]
    assert sorted(battles(games)) == sorted([1 - s for s in BATTLE_SCORES[first]] + BATTLE_SCORES[second])


def test_battles_need_two_known_verdicts():
    good = {"score": "A>B"}
    for other in (None, {"score": None}, {"score": "A>>>B"}):
        assert battles([good, other]) is battles([other, good]) is None
    assert battles([good]) is None
    assert battles([good, good]) == [1.0, 0.0]


def test_official_bootstrap_scatters_about_the_mean():
    scores = [1.0] * 30 + [0.0] * 50 + [0.5] * 20
    drawn = [official_bootstrap(scores, seed) for seed in range(20)]
    assert len(set(drawn)) == 20
    for found, low, high in drawn:
        assert found == pytest.approx(0.4, abs=0.02) and low < 0.4 < high


def test_score_judgments_counts_a_strong_verdict_three_times(tmp_path):
    games = {"a": ("B>>A", "A>B"), "b": ("A>B", "B>A"), "c": ("A=B", None)}
    rows = [{"uid": uid, "games": [{"score": score} for score in each]} for uid, each in games.items()]
    write_jsonl(tmp_path / "j.jsonl", rows)
    found = score_judgments(tmp_path / "j.jsonl", {"a": "hard", "b": "hard", "c": "soft"})
    assert weighted_mean(found.rows["hard"]) == pytest.approx(100 * 4 / 6)
    assert found.rows["soft"] == {} and found.counts["questions dropped"] == 1
    assert found.official.keys() == {"hard, official bootstrap"}


def test_run_official_says_that_a_script_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluation.official.SCRIPT_SECONDS", 0.1)
    (tmp_path / "script.py").write_text("while True:\n    pass\n")
    with pytest.raises(ScriptError, match=r"script.py did not end within 0.1 s"):
        run_official(tmp_path / "script.py", cwd=tmp_path, stubs={})
