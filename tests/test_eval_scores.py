"""Arithmetic against slow oracles: means, intervals, Arena-Hard's verdicts; and against the official data."""

import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.alpaca_eval.scores import read_pilot_preference, read_preference, win_rate_rows
from evaluation.arena_hard.scores import BATTLE_SCORES, battles, official_bootstrap, read_label, score_judgments
from evaluation.benchmark import OutputError
from evaluation.files import write_jsonl
from evaluation.metric import Row, bootstrap_interval, mean, paired_difference
from rankbuffer_trl.judge.verdicts import VerdictError

PATTERNS = [r"\[\[([AB<>=]+)\]\]", r"\[([AB<>=]+)\]"]

values = st.floats(-100, 100)
weights = st.floats(0.1, 6)
rows = st.dictionaries(st.integers(0, 50).map(str), st.builds(Row, values, weights), min_size=2, max_size=30)


@settings(max_examples=25)
@given(rows)
def test_a_metric_is_the_weighted_mean_inside_its_interval(rows):
    copies = [row.value for row in rows.values() for _ in range(round(row.weight * 1000))]
    assert mean(rows) == pytest.approx(sum(copies) / len(copies), abs=0.2)
    found = bootstrap_interval(rows)
    assert min(row.value for row in rows.values()) - 1e-9 <= found.low <= found.high
    assert found.high <= max(row.value for row in rows.values()) + 1e-9
    assert (found.value, found.n) == (mean(rows), len(rows))
    assert bootstrap_interval(rows) == found, "the same seed gives the same interval"


def test_an_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(0)
    hits = 0
    for seed in range(100):
        sample = {str(i): Row(rng.gauss(3, 10)) for i in range(60)}
        found = bootstrap_interval(sample, seed)
        hits += found.low <= 3 <= found.high
    assert 88 <= hits <= 99


def test_an_interval_has_the_width_of_the_normal_one():
    rng = random.Random(1)
    sample = [rng.gauss(0, 5) for _ in range(400)]
    found = bootstrap_interval({str(i): Row(x) for i, x in enumerate(sample)})
    middle = sum(sample) / 400
    error = math.sqrt(sum((x - middle) ** 2 for x in sample) / 399 / 400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)


def test_few_rows_have_no_interval():
    assert math.isnan(mean({}))
    assert math.isnan(bootstrap_interval({"a": Row(1.0)}).low)
    assert math.isnan(paired_difference({"a": Row(1.0)}, {"b": Row(1.0)}).value)


@settings(max_examples=25)
@given(rows, st.floats(-5, 5))
def test_a_shift_is_found_exactly_by_pairs(first, shift):
    second = {key: Row(row.value + shift, row.weight) for key, row in first.items()} | {"alone": Row(0.0)}
    found = paired_difference(first, second)
    assert found.n == len(first)
    for number in found[:3]:
        assert number == pytest.approx(shift, abs=1e-6)
    back = paired_difference(second, first)
    assert back.value == pytest.approx(-found.value, abs=1e-9)


def test_pairs_see_what_separate_intervals_do_not():
    rng = random.Random(2)
    first = {str(i): Row(rng.gauss(0, 30)) for i in range(200)}
    second = {key: Row(row.value + rng.gauss(2, 3)) for key, row in first.items()}
    a, b, found = bootstrap_interval(first), bootstrap_interval(second), paired_difference(first, second)
    assert a.high > b.low and found.low > 0


@given(st.dictionaries(st.text(max_size=3), st.one_of(st.none(), st.just(math.nan), st.floats(1, 2), st.just(0))))
def test_win_rates_leave_out_what_has_no_preference(preferences):
    known = [p for p in preferences.values() if p is not None and not math.isnan(p)]
    found = win_rate_rows(preferences)
    assert len(found) == len(known)
    if known:
        oracle = sum(50 if p == 0 else 100 * (p - 1) for p in known) / len(known)
        assert mean(found) == pytest.approx(oracle)


def answer(*tokens: tuple[str, float]) -> dict:
    top = [{"token": token, "logprob": value} for token, value in tokens]
    return {"content": [{"token": tokens[0][0], "top_logprobs": top}]}


@given(st.floats(-50, 0), st.floats(-50, 0), st.booleans())
def test_a_preference_is_the_models_share_of_the_two_tokens(m, M, switched):
    share = math.exp(m if switched else M) / (math.exp(m) + math.exp(M))
    found = read_preference(answer(("x", -1.0), ("M", M), ("m", m)), switched)
    assert found == pytest.approx(1 + share)
    assert read_pilot_preference(answer(("x", -1.0), ("M", M), ("m", m)), switched) == found


def test_a_token_that_is_not_among_the_likeliest_has_no_share():
    assert read_preference(answer(("m", -0.1), ("x", -3.0)), switched=False) == 1
    assert read_preference(answer(("m", -0.1), ("M", -math.inf)), switched=True) == 2
    assert read_preference(answer(("M", -9999.0), ("m", -1.0)), switched=True) == 2
    assert read_preference(answer(("Both", -0.1)), switched=True) is None
    with pytest.raises(VerdictError, match="it said 'Both'"):
        read_pilot_preference(answer(("Both", -0.1)), switched=True)


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": []}, {"content": [{}]}, [1], "m"])
def test_an_answer_without_logprobs_is_refused(logprobs):
    for read in (read_preference, read_pilot_preference):
        with pytest.raises(VerdictError, match="returns no logprobs"):
            read(logprobs, True)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_log_probability_is_refused_and_never_a_preference(value):
    for tokens in ((("m", value), ("M", -1.0)), (("M", value), ("x", -1.0))):
        with pytest.raises(VerdictError, match=f"the log probability {value} for"):
            read_preference(answer(*tokens), switched=True)
    assert read_preference(answer(("m", 0.0), ("x", value)), switched=True) == 2


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
def test_a_verdict_is_the_last_match_of_the_first_pattern(text):
    assert read_label(text, PATTERNS) == official_label(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[A>B]] or rather [[B>>A]]", "B>>A"),
        ("[[a=b]]", "A=B"),
        ("[[A > B]]", None),
        ("[[A>>>B]]", "A>>>B"),
        ("[B>A] but [[A>B]]", "A>B"),
        ("no [verdict]", None),
        ("", None),
    ],
)
def test_verdicts_of_the_reference(text, found):
    assert read_label(text, PATTERNS) == found


@given(st.sampled_from(sorted(BATTLE_SCORES)), st.sampled_from(sorted(BATTLE_SCORES)))
def test_mirrored_labels_and_swapped_places_say_the_same(first, second):
    backwards = "".join({">": "<", "<": ">"}.get(c, c) for c in reversed(first))
    assert BATTLE_SCORES[backwards] == BATTLE_SCORES[first]
    swapped = "".join({"A": "B", "B": "A"}.get(c, c) for c in first)
    assert BATTLE_SCORES[swapped] == [1 - score for score in BATTLE_SCORES[first]]
    games = [{"score": first}, {"score": second}]
    assert sorted(battles(games)) == sorted([1 - s for s in BATTLE_SCORES[first]] + BATTLE_SCORES[second])


def test_games_without_a_known_verdict_make_no_battle():
    good = {"score": "A>B"}
    for other in (None, {"score": None}, {"score": "A>>>B"}):
        assert battles([good, other]) is battles([other, good]) is None
    assert battles([good]) is None
    assert battles([good, good]) == [1.0, 0.0]


def test_the_official_bootstrap_scatters_about_the_mean():
    scores = [1.0] * 30 + [0.0] * 50 + [0.5] * 20
    drawn = [official_bootstrap(scores, seed) for seed in range(20)]
    assert len(set(drawn)) == 20
    for found, low, high in drawn:
        assert found == pytest.approx(0.4, abs=0.02)
        assert low < 0.4 < high


def judged(uid: str, first: str | None, second: str | None) -> dict:
    return {"uid": uid, "games": [{"score": first}, {"score": second}]}


def test_a_strong_verdict_counts_three_times_and_categories_stay_apart(tmp_path):
    path = tmp_path / "j.jsonl"
    write_jsonl(path, [judged("a", "B>>A", "A>B"), judged("b", "A>B", "B>A"), judged("c", "A=B", None)])
    found = score_judgments(path, {"a": "hard", "b": "hard", "c": "soft"})
    assert mean(found.rows["hard"]) == pytest.approx(100 * 4 / 6)
    assert found.rows["soft"] == {} and found.counts["questions dropped"] == 1
    assert found.official.keys() == {"hard, official bootstrap"}


@pytest.mark.parametrize(
    ("uids", "fault"),
    [("a", "1 of 2 rows are not judged: b"), ("abb", "are judged several times: b"), ("abc", "are no questions: c")],
)
def test_judgments_must_be_whole(tmp_path, uids, fault):
    path = tmp_path / "j.jsonl"
    write_jsonl(path, [judged(uid, "A>B", "A>B") for uid in uids])
    with pytest.raises(OutputError, match=fault.replace("are no questions", "are no questions of this run")):
        score_judgments(path, {"a": "hard", "b": "hard"})
