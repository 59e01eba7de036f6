"""Errors of real judges: records are read, checked and turned into estimates that find a simulated judge again."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from experiments.judge_records.fit import (
    Verdicts,
    both_below,
    consistency,
    estimate,
    interval,
    points_of,
    rated,
    same_opinion,
)
from experiments.judge_records.run import bias_over_data, carried_over, measured, ratings_from_pairs, rollouts, rounded
from experiments.judge_records.sources import (
    LLMBAR,
    REPEATS,
    SOURCES,
    WILDBENCH,
    RecordsError,
    by_rating,
    by_winner,
    choice,
    digest,
    llmbar,
    repeats,
)
from experiments.judge_records.tables import tables

TRUTH, LASTING, NOISE, BIAS = 0.5, 0.3, 0.2, 0.3


def judged(pairs, seed=0, bias=BIAS, ties=0.0, repeats=1, again=0.3, opinion=None):
    """Simulate verdicts on pairs, one pair per prompt. `again` is the share of the noise that a repeat changes."""
    draw = np.random.default_rng(seed).normal
    quality = draw(size=pairs) * TRUTH**0.5
    settled = quality + draw(size=pairs) * LASTING**0.5 if opinion is None else opinion
    looks = np.empty((pairs, 2, repeats))
    for swap, sign in enumerate((1, -1)):
        fixed = draw(size=pairs) * (NOISE * (1 - again)) ** 0.5
        for turn in range(repeats):
            z = sign * settled + fixed + draw(size=pairs) * (NOISE * again) ** 0.5 + bias
            looks[:, swap, turn] = (z > ties) * 1.0 - (z < -ties)
    return Verdicts("judge", "data", "prompt", np.arange(pairs), looks, np.sign(quality)), settled


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-0.99, 0.99))
def test_both_below_agrees_with_scipy(h, k, r):
    expected = multivariate_normal.cdf([h, k], cov=[[1, r], [r, 1]])
    assert both_below(np.array([h]), np.array([k]), np.array([r]))[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("ties", [0.0, 0.2])
def test_estimate_finds_the_errors_of_a_simulated_judge_again(ties):
    verdicts, _ = judged(60_000, ties=ties, repeats=3)
    found = {name: values[0] for name, values in estimate(verdicts, samples=2).items()}
    expected = {"truth": TRUTH, "lasting": LASTING, "fresh": NOISE, "settled": TRUTH + LASTING, "bias": BIAS}
    expected |= {
        "ties": ties,
        "sampling": 0.3 * NOISE,
        "unreadable": 0,
        "agreement": (TRUTH / (TRUTH + LASTING)) ** 0.5,
    }
    expected |= {"pair_noise": 0.5, "pair_bias": BIAS * (2 / 0.8) ** 0.5, "error": 1.0, "lasting_share": 0.6}
    expected |= {"error_bias": 2 * BIAS}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.03)

    looks = verdicts.looks  # the shares are counted one pair at a time
    assert found["tied"] == pytest.approx(np.mean(looks == 0))
    pairs = [(a, b) for a in range(3) for b in range(3)]
    assert found["consistent"] == pytest.approx(np.mean([looks[:, 0, a] == -looks[:, 1, b] for a, b in pairs]))
    right = (1 + verdicts.labels[:, None] * (looks[:, 0] - looks[:, 1]) / 2) / 2
    assert found["accuracy"] == pytest.approx(right.mean())
    again = [looks[:, :, a] == looks[:, :, b] for a, b in pairs if a != b]
    assert found["repeated"] == pytest.approx(np.mean(again))
    wide = (np.array([found[name]]) for name in ("bias", "ties", "settled"))
    assert consistency(*wide)[0] == pytest.approx(found["consistent"], abs=0.01)


def test_estimate_leaves_out_answers_that_cannot_be_read():
    verdicts, _ = judged(3000)
    torn = verdicts.looks.copy()
    torn[::3, 0] = np.nan
    found = estimate(replace(verdicts, looks=torn), samples=2)
    kept = np.arange(3000) % 3 != 0
    only = Verdicts("", "", "", verdicts.asked[kept], verdicts.looks[kept], verdicts.labels[kept])
    assert found["unreadable"][0] == pytest.approx(1 / 6)
    assert found["consistent"][0] == pytest.approx(estimate(only, samples=2)["consistent"][0])


def test_interval_covers_the_truth_and_resamples_whole_prompts():
    hits = []
    for seed in range(60):
        found = estimate(judged(200, seed)[0], seed, samples=100)
        ends = {name: interval(found[name]) for name in ("bias", "fresh", "truth", "lasting")}
        known = {"bias": BIAS, "fresh": NOISE, "truth": TRUTH, "lasting": LASTING}
        hits.append([low <= known[name] <= high for name, (_, low, high) in ends.items()])
    assert np.all(np.mean(hits, axis=0) >= 0.87), np.mean(hits, axis=0)

    verdicts, _ = judged(100)
    copies = replace(verdicts, **{n: np.repeat(getattr(verdicts, n), 9, axis=0) for n in ("asked", "looks", "labels")})
    one, nine = (np.diff(interval(estimate(v)["first"])[1:])[0] for v in (verdicts, copies))
    assert nine == pytest.approx(one), "copies of a pair under the same prompt say nothing new"


def test_estimate_tells_a_taste_for_length_from_truth():
    verdicts, settled = judged(60_000, bias=0.0)
    longer = np.where(np.random.default_rng(1).random(60_000) < 0.5, 1.0, -1.0)
    drawn, _ = judged(60_000, seed=1, bias=0.0, opinion=settled + 0.3 * longer)
    found = estimate(replace(verdicts, looks=drawn.looks, longer=longer), samples=2)
    assert found["prefers_longer"][0] > 0.56
    assert found["right_longer"][0] - found["right_shorter"][0] == pytest.approx(
        2 * found["prefers_longer"][0] - 1, abs=1e-9
    )
    neutral = estimate(replace(verdicts, longer=longer), samples=2)
    assert neutral["prefers_longer"][0] == pytest.approx(0.5, abs=0.01)


def test_same_opinion_of_two_ways_of_asking():
    one, settled = judged(60_000)
    other, _ = judged(60_000, seed=1, bias=-0.2, opinion=settled)
    assert same_opinion(one, other, samples=2)[0] == pytest.approx(TRUTH + LASTING, abs=0.02)
    apart, _ = judged(60_000, seed=2)
    assert same_opinion(one, apart, samples=2)[0] == pytest.approx(0, abs=0.02)


def test_rated_predicts_ties_and_accuracy_of_rounded_ratings():
    random = np.random.default_rng(0)
    looks = random.normal(size=(200_000, 2)) * 1.5 / 2**0.5  # the difference has deviation 1.5 points
    looks += random.random((200_000, 1))  # and rounding has no preferred place
    points = np.round(looks)
    difference = looks[:, 0] - looks[:, 1]
    truth = 0.6 * difference / 1.5 + 0.8 * random.normal(size=200_000)
    right = np.where(points[:, 0] == points[:, 1], 0.5, (points[:, 0] > points[:, 1]) == (truth > 0))
    tied, accurate = rated(np.array([1.5]), np.array([0.6]))
    assert tied[0] == pytest.approx(np.mean(points[:, 0] == points[:, 1]), abs=0.005)
    assert accurate[0] == pytest.approx(right.mean(), abs=0.005)
    assert points_of(tied)[0] == pytest.approx(1.5, abs=0.01)


def test_carried_over_takes_noise_and_not_bias_to_another_set():
    sets = {"MT-Bench": 0.0, "Natural": 0.5, "FairEval": -0.5}
    found = {
        ("judge", data, "plain"): estimate(judged(4000, seed, bias)[0], seed, samples=50)
        for seed, (data, bias) in enumerate(sets.items())
    }
    case = carried_over(found, "plain", list(sets), list(sets))
    assert (case["cases"], case["within"]) == (6, 6)
    assert case["error"] < 0.02 < 0.05 < case["error_same_consistency"]
    assert bias_over_data(found, "judge", "plain")["spread"][0] == pytest.approx(0.5, abs=0.05)

    other = judged(4000, 9)[0]
    looks = np.where(np.random.default_rng(0).random(other.looks.shape) < 0.5, 1.0, -1.0)
    found["judge", "MT-Bench", "plain"] = estimate(replace(other, looks=looks), samples=50)
    case = carried_over(found, "plain", ["MT-Bench"], list(sets))
    assert (case["cases"], case["within"]) == (2, 0), "noise of another size is seen"


def test_ratings_from_pairs_where_one_look_is_behind_both():
    found = {}
    for seed, data in enumerate(("Natural", "Adversarial")):
        verdicts, settled = judged(4000, seed)
        random = np.random.default_rng(seed + 10)
        points = 2 * (settled + random.normal(size=4000) * NOISE**0.5)
        won = np.where(random.random(4000) < 1 - np.abs(points), 0, np.sign(points))
        ratings = replace(verdicts, looks=np.stack([won, -won], axis=1)[:, :, None])
        found["judge", data, "Vanilla"] = estimate(verdicts, seed, samples=50)
        found["judge", data, "Rating"] = estimate(ratings, seed, samples=50)
    cases = ratings_from_pairs(found, "judge", "Vanilla", "Rating")
    for case in cases:
        for name in ("tied", "accuracy"):
            assert case[name]["predicted"][0] == pytest.approx(case[name]["seen"][0], abs=0.03)

    blind = np.random.default_rng(0).permutation(ratings.looks)  # the same ties, without an opinion
    found["judge", "Adversarial", "Rating"] = estimate(replace(ratings, looks=blind), samples=50)
    _, case = ratings_from_pairs(found, "judge", "Vanilla", "Rating")
    assert case["tied"]["predicted"][0] == pytest.approx(case["tied"]["seen"][0], abs=0.03)
    assert not case["accuracy"]["within"]


def test_readers_take_odd_verdicts_as_such():
    swaps = {"swap = False": {"winner": "2"}, "swap = True": {"winner": None}}
    assert by_winner(swaps) == pytest.approx([-1, np.nan], nan_ok=True)
    assert by_winner({"swap = False": {}, "swap = True": {"winner": "12"}}) == pytest.approx([np.nan] * 2, nan_ok=True)
    assert by_rating({"score_1": ["7", "stop"], "score_2": ["7", "stop"]}) == [0, 0]
    assert by_rating({"score_1": ["3", "stop"], "score_2": ["10", "stop"]}) == [-1, -1]
    assert by_rating({"score_1": ["", "length"], "score_2": ["4", "stop"]}) == pytest.approx([np.nan] * 2, nan_ok=True)
    assert choice("[[A]] was my first thought. [[B]]", "MTBench") == -1
    assert choice("So it is a tie: [[C]]", "MTBench") == 0
    assert choice("Choice: A\nReason: none", "DevBench") == 1
    for torn in ("", "[[A]", "Therefore Assistant A is better. [A]", "Choice:"):
        assert np.isnan(choice(torn, "MTBench"))
        assert np.isnan(choice(torn, "DevBench"))


JUDGES = ("ChatGPT", "GPT-4", "LLaMA2", "PaLM2")
SETS = (
    "Processed/MT-Bench",
    "Processed/LLMEval^2",
    "Processed/FairEval",
    "LLMBar/Natural",
    "LLMBar/Adversarial/Manual",
)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def pairs_of_llmbar(judge, prompt, count=30):
    """Make pairs in the layout of LLMBar. A template with a reference stores two steps."""
    verdicts, _ = judged(count, seed=sum(map(ord, judge + prompt)))
    for i, (looks, label) in enumerate(zip(verdicts.looks[:, :, 0], verdicts.labels, strict=True)):
        winners = ["2", "1"][int(looks[0] > 0)], ["1", "2"][int(looks[1] > 0)]
        last = {f"swap = {swap}": {"winner": winner} for swap, winner in zip((False, True), winners, strict=True)}
        if prompt.startswith("Rating"):
            last |= {"score_1": [str(5 + i % 3), "stop"], "score_2": ["6", "stop"]}
        steps = [["What matters?", "stop"]] if "Metrics" in prompt else []
        texts = {"input": f"question {i}", "output_1": "long" * (1 + i % 2), "output_2": "longer"}
        yield texts | {"label": 1 if label > 0 else 2, "results": [*steps, last]}


def record_of_repeats(path, judge, turn, data):
    """Write a table in the layout of Position-Bias-Analyzer."""
    path.parent.mkdir(parents=True)
    says = {"MTBench": "[[{}]]", "DevBench": "Choice: {}\nReason: none"}[data]
    with path.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines, delimiter="\t")
        table.writerow(["cmp_index", "question", "A", "B", judge])
        for i in range(20):
            for swap, order in enumerate(("x;y", "y;x")):
                letter = "A" if (i + swap + (i * turn) % 5 // 4) % 2 == 0 else "B"
                table.writerow(
                    [
                        f"{i // 2}-{data};{order}" if i % 2 else f"{i // 2}-{data};{order}".replace("y", "z"),
                        'a "question"\nof two lines',
                        "",
                        "",
                        says.format(letter),
                    ]
                )


@pytest.fixture
def clones(tmp_path):
    """Return a folder with small clones in the layout of the records, and their sources."""
    for judge in JUDGES:
        for folder in SETS:
            for prompt in ("Vanilla_NoRules", "Vanilla", "Metrics_Reference", "Rating", "Rating_NoRules"):
                if not prompt.startswith("Rating") or (judge in JUDGES[:2] and folder.startswith("LLMBar")):
                    path = tmp_path / "LLMBar/Dataset" / folder / "evaluators" / judge / prompt / "result.json"
                    write(path, json.dumps(list(pairs_of_llmbar(judge, prompt))))
        for data in REPEATS.groups:
            for turn in (1, 2, 3):
                name = f"data_{data}_repetition/Repetition{turn}-{judge}/record_{judge}_3.tsv"
                record_of_repeats(tmp_path / "Position-Bias-Analyzer/judgment_data" / name, judge, turn, data)
    for place, pattern in enumerate(WILDBENCH.groups["scores"][0]):
        rows = [{"session_id": f"s{i}", "score": str(1 + (i * (place + 2)) % 7)} for i in range(40)]
        rows += [{"session_id": "torn", "score": "N/A"}, {"session_id": "none"}]
        write(tmp_path / "WildBench" / pattern, json.dumps(rows))
    return tmp_path, [pinned(source, tmp_path) for source in SOURCES]


def pinned(source, folder):
    """Return the source with the sha256 of the files in a folder."""
    clone = folder / source.repository.partition("/")[2]
    groups = {
        name: (patterns, digest(clone, sorted(path for pattern in patterns for path in clone.glob(pattern))))
        for name, (patterns, _) in source.groups.items()
    }
    return replace(source, groups=groups)


def test_records_are_read_from_their_layouts(clones):
    folder, (pairs, again, scores) = clones
    verdicts = {(v.judge, v.data, v.prompt): v for v in llmbar(folder, pairs)}
    assert len(verdicts) == 4 * 5 * 3 + 2 * 2 * 2
    expected, _ = judged(30, seed=sum(map(ord, "GPT-4Metrics_Reference")))
    found = verdicts["GPT-4", "Adversarial", "Metrics_Reference"]
    assert np.array_equal(found.looks, expected.looks)
    assert np.array_equal(found.labels, expected.labels)
    assert list(found.longer[:2]) == [-1, 1]
    assert list(verdicts["GPT-4", "Natural", "Rating"].looks[:3, :, 0].ravel()) == [-1, 1, 0, 0, 1, -1]

    path = next(folder.glob("Position*/*/data_MTBench*/Repetition1-GPT-4/*.tsv"))
    lines = path.read_text(encoding="utf-8").replace("[[A]]", "[[A]", 1)
    path.write_text(lines, encoding="utf-8")
    again = pinned(again, folder)
    (gpt,) = [v for v in repeats(folder, "MTBench", again) if v.judge == "GPT-4"]
    assert gpt.looks.shape == (20, 2, 3)
    assert len(set(gpt.asked)) == 10
    assert np.isnan(gpt.looks).sum() == 1
    assert rollouts(folder, scores, samples=5)["prompts"] == 40


def test_measured_fills_the_tables_from_small_clones(clones):
    folder, sources = clones
    found = rounded(measured(folder, sources, samples=10))
    assert len(found["estimates"]) == 4 * 5 * 3 + 2 * 2 * 2 + 4 * 2
    assert {case["cases"] for case in found["carried_over"]} == {24, 12, 8}
    assert len(found["ratings_from_pairs"]) == 8
    text = tables(found)
    assert text.count("### ") == 12
    assert "nan" not in text
    assert json.loads(json.dumps(found)) == found


def test_measured_refuses_a_changed_or_missing_clone(clones, tmp_path_factory):
    folder, sources = clones
    path = next(folder.glob("LLMBar/Dataset/LLMBar/Natural/evaluators/GPT-4/Rating/result.json"))
    path.write_text(path.read_text(encoding="utf-8").replace('"6"', '"7"', 1), encoding="utf-8")
    with pytest.raises(RecordsError) as refused:
        measured(folder, sources, samples=2)
    assert str(refused.value) == (
        f"the group 'ratings' of {folder / 'LLMBar'} has other files than the pinned commit; get it with: git clone"
        f" https://github.com/princeton-nlp/LLMBar {folder / 'LLMBar'} ; git -C {folder / 'LLMBar'} checkout"
        f" {LLMBAR.commit}"
    )
    with pytest.raises(RecordsError, match="LLMBar is missing; get it with: git clone"):
        measured(tmp_path_factory.mktemp("empty"), sources, samples=2)


def test_stored_estimates_name_their_sources_and_fill_the_tables():
    found = json.loads((Path(__file__).parent / "judge_records.json").read_text(encoding="utf-8"))
    sources = [dict(repository=each.repository, commit=each.commit, licence=each.licence) for each in SOURCES]
    assert found["sources"] == sources
    assert tables(found).count("### ") == 12
