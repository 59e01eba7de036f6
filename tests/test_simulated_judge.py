"""The simulated judge of the benchmarks: each of its errors, its answers, and what a replay measures."""

import json
import math
import sys
from functools import cache
from hashlib import blake2b
from itertools import pairwise, permutations
from random import Random
from statistics import fmean, pstdev

import numpy as np
import pytest
from conftest import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import (
    batch_question,
    duel_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
)

sys.path.insert(0, str(ROOT / "benchmarks"))
from judge_replay import Agreement, Outcome
from simulated_judge import WORLDS, JudgeErrors, World, answer, first_word, looks_at, text

QUALITY = {f"word{i}": i / 10 for i in range(20)}
TEXTS = [text(Random(i), f"word{i}", 30) for i in range(20)]


def query(name: str = "q") -> Query:
    return Query(name, [{"role": "user", "content": f"{name} how?"}], (Rubric("Is right.", 3),), tuple(TEXTS[:7]))


def shown(order, name: str = "q") -> str:
    """Return the prompt that asks for an order of the texts with these numbers; the labels are the numbers."""
    return ranking_question(query(name), [Rollout(i, TEXTS[i]) for i in order]).prompt()


def favours(prompt: str, **errors) -> dict[str, float]:
    """Return what errors without noise add to each response, by its first word."""
    looks = looks_at(prompt, QUALITY, JudgeErrors(noise=0.0, **errors))
    words = [line for line in prompt.splitlines() if line.partition(" ")[0] in QUALITY]
    return {word: look - QUALITY[word] for look, word in zip(looks.values(), map(first_word, words), strict=True)}


def mean_favours(orders, **errors) -> dict[str, float]:
    found = [favours(shown(order), **errors) for order in orders]
    return {word: fmean(each[word] for each in found) for word in found[0]}


PROMPTS = {
    "score": pointwise_question(query(), TEXTS[3]).prompt(),
    "pair": pairwise_question(query(), TEXTS[3], TEXTS[1]).prompt(),
    "duel": duel_question(query(), TEXTS[3], TEXTS[1]).prompt(),
    "insert": insertion_question(query(), TEXTS[:7], TEXTS[9]).prompt(),
    "list": shown([3, 0, 2, 5]),
    "batch": batch_question(query(), TEXTS[:6], TEXTS[10:18]).prompt(),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("lasting", [0.0, 0.3, 1.0])
def test_by_default_an_error_is_a_normal_number_drawn_from_the_prompt(prompt, lasting):
    error = Random(blake2b(prompt.encode(), digest_size=8).digest())
    words = [first_word(line) for line in prompt.splitlines() if first_word(line) in QUALITY]
    expected = []
    for word in words:
        fresh = error.gauss(0, 0.2 * math.sqrt(1 - lasting))
        own = Random(word).gauss(0, 0.2 * math.sqrt(lasting)) if lasting else 0.0
        expected.append(QUALITY[word] + fresh + own)
    looks = looks_at(prompt, QUALITY, JudgeErrors(noise=0.2, lasting=lasting))
    assert list(looks.values()) == expected, "the figures of docs/results/judge_cost.md would move"


@settings(max_examples=30)
@given(order=st.permutations(range(8)), size=st.integers(2, 8))
def test_a_linear_bias_favours_the_first_and_cancels_under_reversal(order, size):
    order = order[:size]
    favour = favours(shown(order), bias=0.6)
    by_place = [favour[f"word{i}"] for i in order]
    assert by_place[0] == pytest.approx(0.3) and by_place[-1] == pytest.approx(-0.3)
    assert all(0.6 / (size - 1) == pytest.approx(a - b) for a, b in pairwise(by_place))
    assert mean_favours([order, order[::-1]], bias=0.6) == pytest.approx(dict.fromkeys(favour, 0.0), abs=1e-12)


@settings(max_examples=30)
@given(order=st.permutations(range(8)))
def test_a_bias_for_the_edges_cancels_under_a_half_turn_and_not_under_reversal(order):
    turned = order[4:] + order[:4]
    favour = favours(shown(order), bias=0.6, shape="edges")
    by_place = [favour[f"word{i}"] for i in order]
    assert by_place == pytest.approx(by_place[::-1])
    assert by_place[:4] == pytest.approx([0.3, 0.9 / 7, -0.3 / 7, -1.5 / 7])
    assert mean_favours([order, order[::-1]], bias=0.6, shape="edges") == pytest.approx(favour)
    balanced = mean_favours([order, turned], bias=0.6, shape="edges")
    assert max(balanced.values()) - min(balanced.values()) == pytest.approx(0.0, abs=1e-12)


def test_a_pair_has_the_whole_bias_and_no_middle_and_a_single_response_has_none():
    assert favours(PROMPTS["pair"], bias=0.6) == pytest.approx({"word3": 0.3, "word1": -0.3})
    assert favours(PROMPTS["pair"], bias=0.6, shape="edges") == pytest.approx({"word3": 0.3, "word1": 0.3})
    for shape in ("linear", "edges"):
        assert favours(PROMPTS["score"], bias=0.6, shape=shape) == pytest.approx({"word3": 0.0})
    last = favours(PROMPTS["insert"], bias=0.6)
    assert last["word0"] == pytest.approx(0.3) and last["word9"] == pytest.approx(-0.3), "the candidate stands last"


def test_a_drawn_direction_belongs_to_the_query():
    signs = set()
    for number in range(40):
        firsts = {
            round(favours(shown(order, f"q{number}"), bias=0.6, drawn=True)[f"word{order[0]}"], 9)
            for order in permutations(range(3))
        }
        assert len(firsts) == 1
        signs |= firsts
    assert signs == {0.3, -0.3}


@settings(max_examples=30)
@given(order=st.permutations([0, 3, 5, 11]))
def test_a_taste_for_labels_moves_with_the_label_and_not_with_the_place(order):
    expected = {"word0": 0.3, "word3": 0.1, "word5": -0.1, "word11": -0.3}
    assert favours(shown(order), labels=0.6) == pytest.approx(expected)
    labelled = [Rollout(label, TEXTS[i]) for label, i in zip((2, 0, 10, 1), order, strict=True)]
    favour = favours(ranking_question(query(), labelled).prompt(), labels=0.6)
    by_label = [favour[f"word{order[place]}"] for place in (1, 3, 0, 2)]
    assert by_label == pytest.approx([0.3, 0.1, -0.1, -0.3])


def test_a_taste_for_labels_leaves_out_the_candidate_that_has_none():
    favour = favours(PROMPTS["insert"], labels=0.6)
    assert favour["word9"] == pytest.approx(0.0, abs=1e-12)
    assert favour["word0"] == pytest.approx(0.3) and favour["word6"] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("prompt", "factor"),
    [
        (PROMPTS["score"], 1.0),
        (PROMPTS["pair"], 1.0),
        (PROMPTS["list"], math.sqrt(1.4)),  # four responses
        (PROMPTS["insert"], 1.4),  # seven anchors and the candidate
        (shown(range(8)), 1.4),
        (shown(range(16)), 1.4**1.5),
        (PROMPTS["batch"], 1.4 ** math.log(14 / 2, 4)),  # six anchors and eight candidates
    ],
    ids=["one", "two", "four", "anchors", "eight", "sixteen", "batch"],
)
def test_a_crowd_makes_each_error_larger_by_a_power_of_the_number_shown(prompt, factor):
    alone = looks_at(prompt, QUALITY, JudgeErrors(noise=0.2, lasting=0.4))
    crowded = looks_at(prompt, QUALITY, JudgeErrors(noise=0.2, lasting=0.4, crowd=1.4))
    for name, word in zip(alone, favours(prompt), strict=True):
        error = alone[name] - QUALITY[word]
        assert crowded[name] - QUALITY[word] == pytest.approx(factor * error)


def test_the_size_of_an_error_is_measured():
    def deviation(n: int, **errors) -> float:
        prompts = [shown(range(n), f"q{number}") for number in range(4000 // n)]
        looks = [looks_at(prompt, QUALITY, JudgeErrors(noise=0.2, **errors)) for prompt in prompts]
        return pstdev(look - QUALITY[f"word{name[1:]}"] for each in looks for name, look in each.items())

    assert deviation(2) == pytest.approx(0.2, rel=0.05)
    assert deviation(8) == pytest.approx(0.2, rel=0.05)
    assert deviation(8, crowd=1.4) == pytest.approx(0.28, rel=0.05)
    assert deviation(8, tails=5.0) == pytest.approx(0.2, rel=0.06)


@pytest.mark.parametrize("degrees", [5.0, 8.0])
def test_tails_are_heavier_at_the_same_standard_deviation(degrees):
    random, errors = Random(0), JudgeErrors(tails=degrees)
    draws = [errors.draw(random, 2.0) for _ in range(50_000)]
    assert fmean(draws) == pytest.approx(0.0, abs=0.03)
    assert pstdev(draws) == pytest.approx(2.0, rel=0.02)
    share = fmean(abs(draw) > 6.0 for draw in draws)
    assert share > 2 * 0.0027, "a normal number is beyond three deviations in 0.27 % of the draws"


@cache
def in_both_orders(errors: JudgeErrors, pairs: int = 2000) -> dict[str, float]:
    """Ask for the order of pairs of rollouts, each in both orders of presentation. Return what a record shows."""
    random, first, right, agree = Random(0), [], [], []
    for number in range(pairs):
        quality = {f"x{number}": random.gauss(0, World.within), f"y{number}": random.gauss(0, World.within)}
        better = max(quality, key=quality.get)
        chosen = []
        for shown in (list(quality), list(quality)[::-1]):
            prompt = ranking_question(query(), [Rollout(i, name) for i, name in enumerate(shown)]).prompt()
            chosen.append(shown[json.loads(answer(prompt, quality, errors))["order"][-1]])
            first.append(chosen[-1] == shown[0])
        right += [name == better for name in chosen]
        agree.append(chosen[0] == chosen[1])
    return {"first": fmean(first), "consistent": fmean(agree), "right": fmean(right)}


PAGE = (ROOT / "docs" / "results" / "judge_cost.md").read_text()


def worlds_of_the_page() -> dict[str, list[str]]:
    """Return the settings of each world, and what it shows on pairs beside the range of the records."""
    rows = PAGE.partition("| world | `noise` | `lasting` | `bias` |")[2].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: rest for name, *rest in cells}


RECORDS = json.loads((ROOT / "benchmarks" / "judge_records.json").read_text())["estimates"]
LIKE = {"careful": "GPT-4", "biased": "ChatGPT", "blunt": "LLaMA2"}


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_judges_pairs_as_the_page_and_the_records_say(world):
    """A range of the records goes from the lowest to the highest end of the intervals of one judge on two sets."""
    asked = {"judge": LIKE[world], "prompt": "Vanilla_NoRules"}
    records = [each for each in RECORDS if asked.items() <= each.items() and each["data"] in ("MT-Bench", "LLMEval^2")]
    assert len(records) == 2
    *settings, first, firsts, consistent, consistents, right, rights = worlds_of_the_page()[world]
    errors = WORLDS[world]
    assert list(map(float, settings)) == [errors.noise, errors.lasting, errors.bias]
    shown = {"first": (first, firsts), "consistent": (consistent, consistents), "accuracy": (right, rights)}
    for (name, (claim, records_say)), seen in zip(shown.items(), in_both_orders(errors).values(), strict=True):
        assert float(claim) == pytest.approx(seen, abs=0.005)
        low, high = min(each[name][1] for each in records), max(each[name][2] for each in records)
        assert records_say == f"{low:.2f} to {high:.2f}"
        assert low <= float(claim) <= high
    lasting = [each["lasting_share"] for each in records]
    assert min(each[1] for each in lasting) <= errors.lasting <= max(each[2] for each in lasting)


@pytest.mark.parametrize("world", WORLDS)
def test_seen_from_its_settled_opinion_a_judge_gives_the_same_verdicts(world):
    errors = WORLDS[world]
    settled = errors.settled(World.within)
    assert settled.lasting == 0
    found, seen = in_both_orders(errors), in_both_orders(settled)
    assert [seen["first"], seen["consistent"]] == pytest.approx([found["first"], found["consistent"]], abs=0.025)
    assert seen["right"] > found["right"] + 0.05, "what lasts is no error against the settled opinion"


def test_a_judge_without_lasting_errors_is_settled():
    errors = JudgeErrors(noise=0.1, bias=0.2, crowd=1.4, labels=0.1)
    assert errors.settled(0.25) == errors
    twice = JudgeErrors(noise=0.5, lasting=0.75, bias=0.2).settled(0.25)  # lasting part: sqrt(3) times the spread
    assert (twice.noise, twice.bias) == pytest.approx((0.125, 0.1))


def test_a_spread_of_groups_changes_nothing_but_the_deviation_within_a_group():
    def deviations(world: World) -> list[float]:
        return [
            pstdev(quality[first_word(rollout.text)] for rollout in group.answered)
            for number in range(30)
            for groups, quality in [world.visits(number, 30)]
            for group in groups
        ]

    alike, spread = deviations(World()), deviations(World(spread=0.7))
    ratios = [b / a for a, b in zip(alike, spread, strict=True)]
    assert pstdev(map(math.log, ratios)) == pytest.approx(0.7, rel=0.3)
    assert all(a == pytest.approx(b) for a, b in zip(ratios[::4], ratios[1::4], strict=True)), "one per query"
    assert fmean(map(math.log, ratios)) == pytest.approx(0.0, abs=0.4)


numbers = st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=3, max_size=8)


@settings(max_examples=30)
@given(groups=st.lists(numbers, min_size=2, max_size=4), seed=st.integers(0, 99))
def test_cosines_are_those_of_the_advantages(groups, seed):
    groups = [*groups, [0.1] * 3]  # three times 0.1 is not 0.3
    random = Random(seed)
    qualities = [[random.gauss(0, 1) for _ in group] for group in groups]
    outcome = Outcome(agreements=[Agreement.of(*pair) for pair in zip(groups, qualities, strict=True)])
    for divided in (False, True):
        own, true = [], []
        for rewards, values in zip(groups, qualities, strict=True):
            advantage = np.array(rewards) - np.mean(rewards)
            size = np.std(rewards, ddof=1)
            own += list(advantage / size if divided and len(set(rewards)) > 1 else advantage)
            true += list(np.array(values) - np.mean(values))
        if np.linalg.norm(own) > 1e-9:
            cosine = np.dot(own, true) / np.linalg.norm(own) / np.linalg.norm(true)
            assert outcome.cosine_of_run(divided) == pytest.approx(cosine, abs=1e-6)
    for agreement, rewards, values in zip(outcome.agreements, groups, qualities, strict=True):
        expected = np.corrcoef(rewards, values)[0, 1] if len(set(rewards)) > 1 else 0.0
        assert agreement.cosine == pytest.approx(expected, abs=1e-6)


def test_the_judge_answers_a_list_by_its_labels():
    exact = JudgeErrors(noise=0.0)
    assert json.loads(answer(PROMPTS["list"], QUALITY, exact)) == {"order": [0, 2, 3, 5]}
    by_slot = ranking_question(query(), [Rollout(i, TEXTS[i]) for i in (3, 0, 2, 5)], by_slot=True)
    assert by_slot.read(answer(by_slot.prompt(), QUALITY, exact)) == [1, 2, 0, 3]


@settings(max_examples=30)
@given(
    anchors=st.lists(st.integers(0, 19), min_size=2, max_size=6, unique=True),
    candidates=st.lists(st.integers(0, 19), min_size=1, max_size=8, unique=True),
    noise=st.sampled_from([0.0, 0.5]),
)
def test_the_judge_places_a_batch_among_the_anchors(anchors, candidates, noise):
    """Errors may put anchors and candidates into any order. The verdict is valid, and agrees with the looks."""
    anchors = [i for i in anchors if i not in candidates]
    assume(len(anchors) >= 2)
    question = batch_question(query(), [TEXTS[i] for i in anchors], [TEXTS[i] for i in candidates])
    prompt, errors = question.prompt(), JudgeErrors(noise=noise)
    looks = looks_at(prompt, QUALITY, errors)
    assert list(looks) == [*(f"A{i}" for i in range(len(anchors))), *(f"R{i}" for i in range(len(candidates)))]
    verdict = json.loads(answer(prompt, QUALITY, errors))
    question.read(json.dumps(verdict))
    ordered = [looks[f"R{i}"] for i in verdict["order"]]
    assert ordered == sorted(ordered)
    for own, position in zip(ordered, verdict["positions"], strict=True):
        assert position == sum(looks[f"A{i}"] < own for i in range(len(anchors)))
