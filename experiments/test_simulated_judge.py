"""The simulated judge of the experiments: each of its errors, its answers, and the judges of `WORLDS`."""

import asyncio
import json
import math
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from itertools import permutations
from random import Random
from statistics import fmean, pstdev
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import fit_doubts
from experiments.judge_cost.replay import SimulatedJudge
from experiments.real_judge.answers import BETTER
from experiments.real_judge.ask import INSERTED, LISTED
from experiments.real_judge.report import Verdict
from experiments.simulated_judge import (
    WORLDS,
    Doubts,
    JudgeErrors,
    World,
    answer,
    first_word,
    perceived_qualities,
    reply,
    spell,
    text,
)
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import (
    Judge,
    Reading,
    Reply,
    Usage,
    duel_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    position_verdict,
    ranking_question,
    read_chances,
    score_verdict,
)
from rankbuffer_trl.rewards import PairsSoft, RankBufferSoft, RatingsSoft, first_questions

QUALITY = {f"word{i}": i / 10 for i in range(20)}
TEXTS = [text(Random(i), f"word{i}", 30) for i in range(20)]


def query(name: str = "q") -> Query:
    return Query(name, [{"role": "user", "content": f"{name} how?"}], (Rubric("Is right.", 3),), tuple(TEXTS[:7]))


def shown(order, name: str = "q") -> str:
    """Return the prompt that asks for an order of the texts with these numbers; the labels are the numbers."""
    return ranking_question(query(name), [Rollout(i, TEXTS[i]) for i in order]).prompt()


def favours(prompt: str, **errors) -> dict[str, float]:
    """Return what errors without noise add to each response, by its first word."""
    looks = perceived_qualities(prompt, QUALITY, JudgeErrors(noise=0.0, **errors))
    words = [line for line in prompt.splitlines() if line.partition(" ")[0] in QUALITY]
    return {word: look - QUALITY[word] for look, word in zip(looks.values(), map(first_word, words), strict=True)}


PROMPTS = {
    "score": pointwise_question(query(), TEXTS[3]).prompt(),
    "pair": pairwise_question(query(), TEXTS[3], TEXTS[1]).prompt(),
    "duel": duel_question(query(), TEXTS[3], TEXTS[1]).prompt(),
    "insert": insertion_question(query(), TEXTS[:7], TEXTS[9]).prompt(),
    "list": shown([3, 0, 2, 5]),
}
CROWDED = {  # the factor of an error at crowd 1.4
    "score": 1.0,
    "pair": 1.0,
    "duel": 1.0,
    "list": math.sqrt(1.4),  # four responses
    "insert": 1.4,  # seven anchors and the candidate
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_perceived_qualities_draws_normal_errors_from_the_prompt_and_a_crowd_makes_them_larger(kind):
    """The stored figures depend on these draws."""
    prompt = PROMPTS[kind]
    words = [first_word(line) for line in prompt.splitlines() if first_word(line) in QUALITY]
    for lasting in (0.0, 0.3, 1.0):
        error, expected = Random(blake2b(prompt.encode(), digest_size=8).digest()), []
        for word in words:
            fresh = error.gauss(0, 0.2 * math.sqrt(1 - lasting))
            expected.append(fresh + (Random(word).gauss(0, 0.2 * math.sqrt(lasting)) if lasting else 0.0))
        for errors, factor in (({}, 1.0), ({"crowd": 1.4}, CROWDED[kind])):
            looks = perceived_qualities(prompt, QUALITY, JudgeErrors(noise=0.2, lasting=lasting, **errors)).values()
            found = [look - QUALITY[word] for look, word in zip(looks, words, strict=True)]
            assert found == pytest.approx([factor * each for each in expected]), (lasting, errors)


@settings(max_examples=30)
@given(order=st.permutations(range(12)), size=st.integers(3, 8), shape=st.sampled_from(["linear", "edges"]))
def test_favour_follows_the_place_or_the_label(order, size, shape):
    order = order[:size]
    shares = {i: place / (size - 1) for place, i in enumerate(order)}
    gains = {i: 0.5 - share if shape == "linear" else abs(2 * share - 1) - 0.5 for i, share in shares.items()}
    expected = {f"word{i}": 0.6 * gain for i, gain in gains.items()}
    assert favours(shown(order), bias=0.6, shape=shape) == pytest.approx(expected)
    labels = {f"word{i}": 0.6 * (0.5 - sorted(order).index(i) / (size - 1)) for i in order}  # 10 comes after 9
    assert favours(shown(order), labels=0.6) == pytest.approx(labels)


def test_favour_is_whole_in_a_pair_and_none_for_what_stands_alone():
    assert favours(PROMPTS["pair"], bias=0.6) == pytest.approx({"word3": 0.3, "word1": -0.3})
    assert favours(PROMPTS["pair"], bias=0.6, shape="edges") == pytest.approx({"word3": 0.3, "word1": 0.3})
    for shape in ("linear", "edges"):
        assert favours(PROMPTS["score"], bias=0.6, shape=shape) == pytest.approx({"word3": 0.0})
    last = favours(PROMPTS["insert"], bias=0.6)
    assert last["word0"] == pytest.approx(0.3) and last["word9"] == pytest.approx(-0.3), "the candidate stands last"
    labels = favours(PROMPTS["insert"], labels=0.6)
    assert labels["word9"] == pytest.approx(0.0, abs=1e-12), "the candidate has no label"
    assert labels["word0"] == pytest.approx(0.3) and labels["word6"] == pytest.approx(-0.3)


def test_favour_of_a_drawn_direction_belongs_to_the_query():
    signs = set()
    for number in range(40):
        orders = permutations(range(3))
        firsts = {
            round(favours(shown(order, f"q{number}"), bias=0.6, drawn=True)[f"word{order[0]}"], 9) for order in orders
        }
        assert len(firsts) == 1
        signs |= firsts
    assert signs == {0.3, -0.3}


@cache
def in_both_orders(errors: JudgeErrors, pairs: int = 2000) -> dict[str, float]:
    """Ask for the order of pairs of rollouts, each in both orders of presentation. Return what a record shows."""
    random, first, right, agree = Random(0), [], [], []
    for number in range(pairs):
        quality = {f"x{number}": random.gauss(0, World.within), f"y{number}": random.gauss(0, World.within)}
        better = max(quality, key=quality.get)
        chosen = []
        for names in (list(quality), list(quality)[::-1]):
            prompt = ranking_question(query(), [Rollout(i, name) for i, name in enumerate(names)]).prompt()
            chosen.append(names[json.loads(answer(prompt, quality, errors))["order"][-1]])
            first.append(chosen[-1] == names[0])
        right += [name == better for name in chosen]
        agree.append(chosen[0] == chosen[1])
    return {"first": fmean(first), "consistent": fmean(agree), "accuracy": fmean(right)}


RECORDS = {  # judge_cost/README.md has their source
    "careful": {"first": (0.45, 0.54), "consistent": (0.82, 0.92), "accuracy": (0.73, 0.86), "lasting": (0.46, 0.94)},
    "biased": {"first": (0.59, 0.74), "consistent": (0.50, 0.78), "accuracy": (0.66, 0.77), "lasting": (0.00, 0.99)},
    "blunt": {"first": (0.47, 0.66), "consistent": (0.60, 0.80), "accuracy": (0.65, 0.77), "lasting": (0.03, 0.71)},
}


@pytest.mark.parametrize("world", WORLDS)
def test_worlds_judge_pairs_as_the_records_say(world):
    seen = in_both_orders(WORLDS[world]) | {"lasting": WORLDS[world].lasting}
    for name, (low, high) in RECORDS[world].items():
        assert low <= seen[name] <= high, name


@pytest.mark.parametrize("world", WORLDS)
def test_settled_judges_give_the_same_verdicts(world):
    errors = WORLDS[world]
    settled = errors.settled(World.within)
    assert settled.lasting == 0
    found, seen = in_both_orders(errors), in_both_orders(settled)
    assert [seen["first"], seen["consistent"]] == pytest.approx([found["first"], found["consistent"]], abs=0.025)
    assert seen["accuracy"] > found["accuracy"] + 0.05, "what lasts is no error against the mean preference"


def test_settled_changes_only_what_lasts():
    errors = JudgeErrors(noise=0.1, bias=0.2, crowd=1.4, labels=0.1)
    assert errors.settled(0.25) == errors
    twice = JudgeErrors(noise=0.5, lasting=0.75, bias=0.2, labels=0.4).settled(0.25)  # lasting: sqrt(3) spreads
    assert (twice.noise, twice.bias, twice.labels) == pytest.approx((0.125, 0.1, 0.2))


def test_visits_of_a_spread_world_differ_only_in_the_deviation_within_a_group():
    def deviations(world: World) -> list[float]:
        return [
            pstdev(quality[first_word(rollout.text)] for rollout in group.answered)
            for number in range(30)
            for groups, quality in [world.visits(number, 30)]
            for group in groups
        ]

    ratios = [b / a for a, b in zip(deviations(World()), deviations(World(spread=0.7)), strict=True)]
    assert pstdev(map(math.log, ratios)) == pytest.approx(0.7, rel=0.3)
    assert all(a == pytest.approx(b) for a, b in zip(ratios[::4], ratios[1::4], strict=True)), "one per query"
    assert fmean(map(math.log, ratios)) == pytest.approx(0.0, abs=0.4)


def test_answer_orders_a_list_by_its_labels():
    exact = JudgeErrors(noise=0.0)
    assert json.loads(answer(PROMPTS["list"], QUALITY, exact)) == {"order": [0, 2, 3, 5]}
    by_slot = ranking_question(query(), [Rollout(i, TEXTS[i]) for i in (3, 0, 2, 5)], by_slot=True)
    assert by_slot.read(answer(by_slot.prompt(), QUALITY, exact)) == [1, 2, 0, 3]


# A judge with doubts

SURE = JudgeErrors(noise=0.0)
HABITS = Doubts(JudgeErrors(0.0, bias=9.0), SURE, SURE, SURE, 0.1, 0.1, 2.0, 0.1, 8.0, 1.0)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=10))
def test_spell_tells_the_probabilities_that_a_reader_finds(weights):
    answer, logprobs = spell("position", dict(enumerate(weights)))
    value = json.loads(answer)["position"]
    reading = read_chances(position_verdict(len(weights) - 1), value, logprobs)
    total = sum(map(math.exp, weights))
    assert reading.chances == pytest.approx({p: math.exp(weight) / total for p, weight in enumerate(weights)})
    assert weights[value] == pytest.approx(max(weights)) and (reading.outside, reading.shared) == pytest.approx((0, 0))


def test_spell_shares_the_first_digit_of_numbers():
    """The judge says the digit 1 first, and then whichever of 1 and 10 is likelier."""
    answer, logprobs = spell("score", {1: math.log(0.3), 10: math.log(0.25), 8: math.log(0.45)})
    assert answer == '{"score": 1}'
    reading = read_chances(score_verdict(10), 1, logprobs)
    assert reading.chances == pytest.approx(dict.fromkeys(range(11), 0.0) | {1: 0.3, 10: 0.25, 8: 0.45})


@settings(max_examples=20)
@given(st.lists(st.integers(0, 19), min_size=2, max_size=8, unique=True))
def test_probabilities_of_a_judge_with_habits_order_what_its_word_ties(order):
    """The judge says `A`, 8 and the highest position to everything."""
    client = SimulatedJudge(HABITS, count=False)
    client.quality = QUALITY
    group = RolloutGroup(query(), tuple(Rollout(i, TEXTS[number]) for i, number in enumerate(order)), 0, 0)
    rank = [2 * sorted(order).index(number) / (len(order) - 1) - 1 for number in order]
    for method in (RatingsSoft(), PairsSoft(), RankBufferSoft()):
        words = {
            json.loads(reply(each.prompt(), QUALITY, HABITS)[0]).popitem() for each in first_questions(method, group)
        }
        assert len(words) == 1, method
        score = asyncio.run(method.score(group, None, Judge(client, guard=False)))
        assert [group.rollouts[i].id for (i,) in score.order] == sorted(range(len(order)), key=order.__getitem__)
        assert method == RatingsSoft() or score.rewards == pytest.approx(rank)


def test_doubts_err_by_the_kind_of_question():
    kinds = [JudgeErrors(noise=number) for number in range(4)]
    doubts = Doubts(*kinds, 1, 1, 0, 1, 8, 1)
    for name, number in (("pair", 0), ("insert", 1), ("score", 2), ("list", 3), ("duel", 3)):
        assert doubts.errors(PROMPTS[name]).noise == number, name
    assert json.loads(reply(PROMPTS["list"], QUALITY, HABITS)[0]) == {"order": [0, 2, 3, 5]}
    assert reply(PROMPTS["pair"], QUALITY, SURE) == (answer(PROMPTS["pair"], QUALITY, SURE), ANY)


def recorded(doubts: Doubts, queries: int) -> list[dict]:
    """Record what a judge with doubts says about answers whose differences in quality are those of two references."""
    record, random = [], Random(0)
    for number in range(queries):
        quality = dict.fromkeys(("good", "good_2"), fit_doubts.STEP)
        for one, other in BETTER:
            quality[other] = quality[one] - abs(random.gauss(0, fit_doubts.APART))
        words = {f"{name}{number}": value for name, value in quality.items()}
        asked = {f"score9 {name}": pointwise_question(query(), f"{name}{number}", most=9) for name in quality}
        for one, other in (pair for two in BETTER for pair in (two, two[::-1])):
            asked[f"pair {one} {other}"] = pairwise_question(query(), f"{one}{number}", f"{other}{number}", tie=False)
        anchors = [f"{name}{number}" for name in ("weak_shuffled", "weak", "good_2")]
        for name in INSERTED:
            asked[f"insert {name}"] = insertion_question(query(), anchors, f"{name}{number}")
        shown = random.sample(LISTED, 5)
        for look, names in (("list", shown), ("list_reversed", shown[::-1])):
            rollouts = [Rollout(i, f"{name}{number}") for i, name in enumerate(names)]
            asked[" ".join([look, *names])] = ranking_question(query(), rollouts)
        verdicts = {}
        for name, question in asked.items():
            soft = replace(question, soft="list" not in name)
            text, logprobs = reply(question.prompt(), words, doubts)
            said = soft.read_reply(Reply(text, Usage(), logprobs=logprobs))
            verdicts[name] = Verdict(said if soft.soft else Reading(said, {}, 0, 0), 0, 0)
        record.append(verdicts)
    return record


def test_fit_finds_the_judge_of_a_record():
    pair, lists = JudgeErrors(0.9, 0.5, bias=3.0), JudgeErrors(1.2, 0.5, bias=2.0)
    true = Doubts(pair, JudgeErrors(0.8, 0.5), JudgeErrors(0.6, 0.5), lists, 0.15, 0.4, 0.5, 0.3, 7.0, 1.5)
    found = fit_doubts.fit(recorded(true, 300))
    assert found.pair.bias == pytest.approx(3.0, rel=0.15) and found.pair.lasting == pytest.approx(0.5, abs=0.15)
    for kind in ("pair", "insertion", "rating", "lists"):
        assert getattr(found, kind).noise == pytest.approx(getattr(true, kind).noise, rel=0.2), kind
    assert found.lists.bias == pytest.approx(2.0, rel=0.2)
    names = ("odds", "step", "habit", "points", "centre", "width")
    assert [getattr(found, each) for each in names] == pytest.approx([getattr(true, each) for each in names], rel=0.2)
