"""The probabilities behind a verdict: each token of an answer counts for the alternatives that it leaves."""

import json
import math
import random
from dataclasses import replace
from itertools import combinations

import pytest
from conftest import ask, scripted_judge
from helpers.judges import opinion, place, shares, spelled
from helpers.quality import CASES, QUALITIES
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Reading, Usage, duel_question, pairwise_question, pointwise_question, ranking_question
from rankbuffer_trl.judge._ledger import Reply
from rankbuffer_trl.judge._probabilities import (
    LEAST_CHANCE,
    SLACK,
    UNSEEN,
    ProbabilityError,
    checked_logprob,
    read_chances,
    read_samples,
)
from rankbuffer_trl.judge._verdicts import VerdictError, position_verdict, score_verdict, winner_verdict
from rankbuffer_trl.rewards._method import load_method
from rankbuffer_trl.rewards._pointwise import Pointwise
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.rewards.beyond._pairs_soft import PairsSoft
from rankbuffer_trl.rewards.beyond._rankbuffer_soft import RankBufferSoft
from rankbuffer_trl.rewards.beyond._ratings_soft import RatingsSoft
from rankbuffer_trl.testing import QUERY, RESPONSE_LINES, fails, faulty, make, play

DIGITS = score_verdict(9)
NUMBERS = score_verdict(10)
LETTERS = winner_verdict(("A", "B", "tie"))
A_OR_B = winner_verdict(("A", "B"))


# Reading, against all that a judge could have said

TOKENS = (" ", "0", "1", "2", "10", "12", "1}", "0}", "}", "0 ", ".5", "x", "")
ENDS = ("}", " }", ",", "\n}")


def next_tokens(seed: int, said: str) -> dict[str, float]:
    """The tokens that may follow, and their probabilities."""
    drawn = random.Random(f"{seed} {said}")
    weights = {token: drawn.random() ** 3 for token in drawn.sample(TOKENS, 5)}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def meant(said: str, K: int) -> list[int]:
    """The positions that an answer can have which goes on after `said`, among all answers there are."""
    answers = [(p, blank + str(p) + end) for p in range(K + 1) for blank in ("", " ", "  ") for end in ENDS]
    return sorted({p for p, answer in answers if answer.startswith(said) or said.startswith(answer)})


def masses(seed: int, said: str, K: int, depth: int = 5) -> tuple[dict[int, float], float]:
    """The probability with which each position is decided, and that of no position; the slow way, over all answers."""
    found, nothing = dict.fromkeys(range(K + 1), 0.0), 0.0
    for token, chance in next_tokens(seed, said).items():
        left = meant(said + token, K) if token else []
        if len(left) > 1 and depth:
            further, lost = masses(seed, said + token, K, depth - 1)
            nothing += chance * lost
            for p in further:
                found[p] += chance * further[p]
        elif len(left) == 1:
            found[left[0]] += chance
        elif not left:
            nothing += chance
    return found, nothing


@given(st.integers(0, 100_000), st.sampled_from([1, 2, 10, 12]))
@example(0, 10)
def test_read_chances_are_those_of_all_answers_up_to_what_is_shared(seed, K):
    said, places = "", []
    while len(meant(said, K)) > 1 and len(places) < 6:
        chances = next_tokens(seed, said)
        token = max((t for t in chances if t and meant(said + t, K)), key=chances.get, default=None)
        if token is None:
            return
        places.append((token, chances))
        said += token
    if len(meant(said, K)) > 1:
        return
    value = meant(said, K)[0]
    reading = read_chances(position_verdict(K), value, spelled('{"', "position", '":', *places, "}"))
    known = 1 - reading.outside - reading.shared
    assert reading.value == value and sum(reading.chances.values()) == pytest.approx(1)
    true, nothing = masses(seed, "", K)
    for p, mass in true.items():
        assert reading.chances[p] * known <= mass + 1e-9, p
        assert mass <= reading.chances[p] * known + reading.shared + 1e-9, p
    assert reading.outside <= nothing + 1e-9
    if reading.shared < 1e-12:
        assert reading.outside == pytest.approx(nothing, abs=1e-9)


def test_read_chances_finds_the_value_however_the_answer_is_cut_into_tokens():
    sure = {"A": 0.6, "B": 0.3, "C": 0.1}
    for name, logprobs in {
        "letter": spelled('{"', "winner", '": "', ("A", sure), '"}'),
        "quote and letter": spelled('{"', "winner", '":', " ", ('"A', {f'"{a}': p for a, p in sure.items()}), '"}'),
        "letter and end": spelled('{"winner', '": "', ('A"}', {f'{a}"}}': p for a, p in sure.items()})),
        "all after the colon": spelled('{"winner"', (': "A"', {f': "{a}"': p for a, p in sure.items()}), "}"),
        "one token": spelled(("x", sure), ('{"winner": "A"}', {f'{{"winner": "{a}"}}': p for a, p in sure.items()})),
        "after prose": spelled("<think>", '"winner": "B"', "</think>", '{"winner": "', ("A", sure), '"}', "\n```"),
        "blanks": spelled('{"winner"', " :", "\n", ' "', ("A", sure), '"', "\n}", "<|im_end|>"),
        "an end without text": spelled('{"winner": "', "", ("A", {"A": 0.6, "B": 0.3, "": 0.1}), '"}', ""),
        "a doubt before the value": spelled('{"winner', ('":', {'":': 0.5, "x": 0.5}), ' "', ("A", sure), '"}'),
    }.items():
        reading = read_chances(A_OR_B, "A", logprobs)
        assert reading.chances == pytest.approx({"A": 2 / 3, "B": 1 / 3}), name
        assert (reading.outside, reading.shared) == pytest.approx((0.1, 0)), name


def test_read_chances_does_not_guess_what_comes_before_the_value():
    chances = {': "A"': 0.6, ': "B"': 0.2, " ": 0.1, ': "': 0.1}  # a blank may stand before the colon
    reading = read_chances(A_OR_B, "A", spelled('{"winner"', (': "A"', chances), "}"))
    assert reading.chances == pytest.approx({"A": 0.75, "B": 0.25})
    assert (reading.outside, reading.shared) == pytest.approx((0, 0.2))


def test_read_chances_of_numbers_that_share_a_token():
    first, second = {"1": 0.5, "8": 0.3, "9": 0.2}, {"0": 0.8, "}": 0.1, ".": 0.1}
    ten = read_chances(NUMBERS, 10, spelled('{"score": ', ("1", first), ("0", second), "}"))
    expected = dict.fromkeys(range(11), 0.0) | {10: 0.4, 1: 0.05, 8: 0.3, 9: 0.2}
    assert ten.chances == pytest.approx({n: chance / 0.95 for n, chance in expected.items()})
    assert (ten.outside, ten.shared) == pytest.approx((0.05, 0))
    unlisted = read_chances(NUMBERS, 10, spelled('{"score": ', ("1", first), ("0", second | {"0": 0.6}), "}"))
    assert (unlisted.outside, unlisted.shared) == pytest.approx((0.05 + 0.5 * 0.2, 0)), "of the half that said 1"
    eight = read_chances(NUMBERS, 8, spelled('{"score": ', ("8", first), "}"))
    assert eight.chances == pytest.approx(dict.fromkeys(range(11), 0.0) | {8: 0.6, 9: 0.4})
    assert (eight.outside, eight.shared) == pytest.approx((0, 0.5))
    assert eight.mean == pytest.approx(8.4)
    assert read_chances(DIGITS, 8, spelled('{"score": ', ("8", first), "}")).mean == pytest.approx(0.5 + 2.4 + 1.8)


def test_read_chances_refuses_to_be_sure_of_what_has_no_alternatives():
    """llama.cpp with a draft model lists them for the first token of an answer alone, and gives the others 0."""
    forced = [{"token": token, "logprob": 0, "top_logprobs": []} for token in ('{"winner', '": "', "A")]
    with pytest.raises(ProbabilityError, match=r"lists no alternatives to 'A', as llama\.cpp does"):
        read_chances(A_OR_B, "A", {"content": forced})
    doubted = place("A", {"A": 0.5, "B": 0.5})
    assert read_chances(A_OR_B, "A", {"content": [*forced[:2], doubted]}).chances == {"A": 0.5, "B": 0.5}


def test_reading_is_the_same_after_json():
    for verdict, value, token in ((DIGITS, 8, "8"), (A_OR_B, "A", '"A"')):
        (key,) = verdict.properties
        places = ((token, {token: 0.5, "x": 0.5}),)
        reading = read_chances(verdict, value, spelled(f'{{"{key}": ', *places, "}"))
        assert Reading.of(json.loads(json.dumps(reading.as_dict()))) == reading, key


def test_read_chances_counts_the_word_and_what_is_not_listed():
    places = place("A", {"B": 0.3, "tie": 0.1}) | {"logprob": math.log(0.4)}  # a grammar chose a token far down
    reading = read_chances(LETTERS, "A", {"content": [*spelled('{"winner": "')["content"], places]})
    assert reading.chances == pytest.approx({"A": 0.5, "B": 0.375, "tie": 0.125})
    assert reading.outside == pytest.approx(0.2)
    assert reading.log_odds("A", "B") == pytest.approx(math.log(4 / 3)) == -reading.log_odds("B", "A")
    sure = read_chances(A_OR_B, "A", spelled('{"winner": "', "A", '"}'))
    assert sure.log_odds("A", "B") == pytest.approx(-math.log(LEAST_CHANCE)) and sure.outside == 0
    many = {str(n): 0.1 for n in range(9)} | {f"x{i}": 5e-4 for i in range(11)}  # so 9 has at most 5e-4
    assert read_chances(DIGITS, 8, spelled('{"score": ', ("8", many))).outside == pytest.approx(0.1)
    masked = place("A", {"A": 0.5, "B": 0.5})
    masked["top_logprobs"] += [{"token": "C", "logprob": -math.inf}, {"token": "D", "logprob": -9999.0}]
    reading = read_chances(A_OR_B, "A", {"content": [*spelled('{"winner": "')["content"], masked]})
    assert reading.chances == {"A": 0.5, "B": 0.5} and reading.outside == pytest.approx(0)


@given(st.lists(st.floats(0, 12), min_size=13, max_size=13), st.integers(0, 13), st.sampled_from([0, 1, 20]))
def test_read_chances_are_right_to_a_hundredth_however_few_tokens_a_server_lists(weights, most, junk):
    """A server may list the said token alone, the likeliest ones, or what its grammar allows."""
    words = shares({w: x - junk * (w > "9") for w, x in zip("0123456789xyz", weights, strict=True)})
    said = max("0123456789", key=words.get)
    listed = dict(sorted(words.items(), key=lambda item: -item[1])[:most])
    at = place(said, listed) | {"logprob": math.log(words[said])}
    at["top_logprobs"] += [{"token": "w", "logprob": -9999.0}] * (most % 2)  # as padding, or masked
    listed[said] = words[said]
    truth = {n: words[str(n)] / sum(words[each] for each in "0123456789") for n in range(10)}
    try:
        reading = read_chances(DIGITS, int(said), {"content": [*spelled('{"score": ')["content"], at]})
    except ProbabilityError as error:
        assert f"lists {len(listed) + most % 2} tokens" in str(error) and len(listed.keys() - set("xyz")) < 10
        assert 1 - sum(listed.values()) > UNSEEN * sum(listed[each] for each in listed.keys() - set("xyz"))
    else:
        assert all(abs(reading.chances[n] - truth[n]) <= UNSEEN + 1e-9 for n in truth)


def test_read_chances_refuses_what_is_no_probability_of_this_answer():
    def at_the_letter(**changes):
        return {"content": [*spelled('{"winner": "')["content"], place("A", {"A": 0.6, "B": 0.4}) | changes]}

    def listing(*values: object) -> dict:
        return at_the_letter(top_logprobs=[{"token": t, "logprob": v} for t, v in zip("ABC", values, strict=False)])

    none, spell = "returns no logprobs", "do not spell its answer"
    for logprobs, fault in (
        *((each, none) for each in (None, {}, [1], "text", {"content": None}, {"content": []}, {"content": [{}]})),
        *((each, none) for each in (at_the_letter(top_logprobs=None), *map(listing, (None, "much", 10**400)))),
        (listing(math.nan, -1.0), "log probability nan for 'A'"),
        (listing(-1.0, math.nan), "log probability nan for 'B'"),
        (listing(math.inf), "log probability inf for 'A'"),
        (listing(0.0015), "log probability 0.0015 for 'A'"),
        (listing(-math.log(2), -math.log(2) + 0.003), "add up to 1.002"),
        (listing(-0.1, -0.1), "at the token 'A' add up to 1.81"),
        (listing(-math.inf, -9999.0, -1.0), "no probability to any valid answer"),
        *((spelled(*said), spell) for said in (('{"winner": "', "B", '"}'), ('{"winner": "',), ('{"score": ', "8"))),
        (spelled("token_id:5", "token_id:6"), spell),
    ):
        with pytest.raises(ProbabilityError, match=fault):
            read_chances(A_OR_B, "A", logprobs)
    assert read_chances(A_OR_B, "A", listing(-math.log(2) + 4e-4, -math.log(2) + 4e-4)).outside == 0, "rounded"


def test_questions_without_one_choice_have_no_probabilities():
    three, two = make([1, 2, 3]).rollouts, ["1.a", "2.b"]
    for hard in (ranking_question(QUERY, three), ranking_question(QUERY, three[:2]), duel_question(QUERY, *two)):
        with pytest.raises(ValueError, match="a verdict of lists has no alternatives"):
            replace(hard, soft=True)


@pytest.mark.parametrize("decoding", ["regex", "json_schema", "none"])
def test_soft_questions_ask_for_logprobs_and_others_do_not(decoding):
    hard = pairwise_question(QUERY, "3.a", "4.b")
    fields = hard.fields(decoding, 9)
    assert not {"logprobs", "top_logprobs"} & set(fields)
    assert replace(hard, soft=True).fields(decoding, 9) == fields | {"logprobs": True, "top_logprobs": 20}
    assert replace(hard, soft=True).chat() == hard.chat()
    prompt = pointwise_question(QUERY, "3.a").prompt()
    assert pointwise_question(QUERY, "3.a", most=9).prompt() == prompt.replace("10", "9")


# Replies of a real judge


def test_read_chances_of_recorded_replies():
    """Qwen2.5-Coder-1.5B-Instruct (Q4_K_M) over llama.cpp, which reports probabilities before its grammar.

    The lists of tokens are whole around the value alone. `bytes` and `id` are left out.
    """
    verdicts = {"score": NUMBERS, "winner": LETTERS, "position": position_verdict(2)}
    with open("tests/recorded/llama_cpp.json") as file:
        rows = json.load(file)
    seen = []
    for row in rows:
        [(key, value)] = json.loads(row["content"]).items()
        reading = read_chances(verdicts[key], value, row["logprobs"])
        seen.append((key, reading.value, max(reading.chances, key=reading.chances.get)))
        assert sum(reading.chances.values()) == pytest.approx(1) and 0 < reading.outside < 0.05, row["decoding"]
        at = {  # a thousandth is on tokens such as a digit without a blank before it
            t["token"]: {x["token"]: math.exp(x["logprob"]) for x in t["top_logprobs"]}
            for t in row["logprobs"]["content"]
        }
        if key == "score":
            ratio = at["1"]["1"] * at["0"]["0"] / at["1"]["8"]
            assert reading.chances[10] / reading.chances[8] == pytest.approx(ratio, rel=0.01)
            assert reading.shared < 1e-3
        if key == "position":
            assert reading.chances[1] / reading.chances[2] == pytest.approx(at["2"]["1"] / at["2"]["2"], rel=0.01)
            assert reading.outside == pytest.approx(at["2"]["3"] + at["2"]["4"], abs=1e-3)
    assert seen == [("score", 10, 10), ("score", 10, 8), ("winner", "A", "A"), ("position", 2, 2)]


# What a judge does when probabilities are lost


def test_a_judge_is_not_asked_again_when_probabilities_are_lost():
    question = replace(pairwise_question(QUERY, "3.a", "4.b", tie=False), soft=True)
    answers = iter(["Hello!", ('{"winner": "A"}', None)])
    judge = scripted_judge(lambda messages: next(answers), max_attempts=4)
    reading, call = ask(judge, question)
    assert reading is None and call.outcome == "malformed" and "returns no logprobs" in call.error
    assert (call.attempts, call.malformed) == (2, 2), "only a malformed answer is asked for again"


# The methods: what the word ties, the probabilities order


@given(st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True), st.sampled_from([-3.0, 0.5, 3.0]))
def test_soft_methods_order_right_where_the_word_ties(qualities, bias):
    def answer(prompt):
        return opinion(prompt, bias if '"winner"' in prompt else 9.0)

    group = make(qualities)
    rank = {q: place for place, q in enumerate(sorted(qualities))}
    expected = [2 * rank[q] / (len(qualities) - 1) - 1 for q in qualities]
    assert play(PairsSoft(), group, answer).rewards == pytest.approx(expected)
    assert play(PairsSoft(orders=1), group, answer).rewards == pytest.approx(expected)
    strengths = [2 * (q - min(qualities)) / (max(qualities) - min(qualities)) - 1 for q in qualities]
    for orders in (1, 2):
        assert play(PairsSoft(orders, "strength"), group, answer).rewards == pytest.approx(strengths)
    rewards = play(RatingsSoft(), group, answer).rewards
    assert sorted(rank, key=dict(zip(qualities, rewards, strict=True)).get) == sorted(rank)
    assert play(RankBufferSoft(), group, answer).rewards == pytest.approx(expected)
    assert len(set(play(Pointwise(), group, lambda prompt: answer(prompt)[0]).rewards)) == 1, "the word says 8 to all"
    assert len(set(play(RankBuffer(fine=False), group, lambda prompt: answer(prompt)[0]).rewards)) == 1, "and 3 of 4"
    assert len({answer(prompt)[0] for prompt in play(PairsSoft(), group, answer).prompts}) == 1, "one place wins all"


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 999), st.sampled_from([0.2, 0.6]))
def test_pairs_soft_counts_a_pair_whose_two_judgments_succeed(qualities, seed, share):
    group, case = make(qualities), (seed, share)

    def answer(prompt):
        shown = RESPONSE_LINES.findall(prompt)
        habit = random.Random(f"{seed} {sorted(shown)}").uniform(-2, 2)  # for one place, whichever response is there
        found, told = opinion(prompt, habit)
        return found, None if fails(case, *shown) else told

    leads = {rollout.id: [] for rollout in group.answered}
    for a, b in combinations(group.answered, 2):
        if not fails(case, a.text, b.text) and not fails(case, b.text, a.text):
            leads[a.id].append(qualities[a.id] - qualities[b.id])
            leads[b.id].append(qualities[b.id] - qualities[a.id])
    means = {i: sum(lead) / len(lead) for i, lead in leads.items() if lead}
    rewards = play(PairsSoft(), group, answer).rewards
    for i in leads:
        if len(leads) == 1:
            assert rewards[i] == 0
        elif i not in means:
            assert rewards[i] is None
        else:
            others = [means[j] - means[i] for j in means if j != i]  # rounding may break a tie
            best, worst = (1 - 2 * sum(lead > by for lead in others) / len(others) for by in (1e-9, -1e-9))
            assert worst - 1e-9 <= rewards[i] <= best + 1e-9


@given(st.lists(st.integers(0, 40), min_size=3, max_size=6), st.integers(0, 999), st.sampled_from([0.2, 0.6]))
def test_pairs_once_are_scored_where_matches_tell_place_and_strengths_apart(qualities, seed, share):
    group, method, case = make(qualities), PairsSoft(orders=1, reward="strength"), (seed, share)
    names = {rollout.text: rollout.id for rollout in group.rollouts}

    def answer(prompt):
        found, told = opinion(prompt, 2.0)
        return found, None if fails(case, *RESPONSE_LINES.findall(prompt)) else told

    played = play(method, group, answer)
    shown = [tuple(names[text] for text in RESPONSE_LINES.findall(prompt)) for prompt in played.prompts]
    seats = [first for first, _ in shown]
    assert max(map(seats.count, seats)) <= len(qualities) / 2
    assert seats == sorted(seats)  # so that a server reads each first answer once
    heard = [(i, j) for i, j in shown if not fails(case, group.rollouts[i].text, group.rollouts[j].text)]
    level = {i: 0 for pair in heard[:1] for i in pair[:1]}  # a place alone explains matches that go down by one level
    for i, j in heard * len(qualities):
        if level.keys() & {i, j}:
            level.setdefault(j, level.get(i, 0) - 1)
            level.setdefault(i, level[j] + 1)
    told = level.keys() == {i for pair in heard for i in pair} and any(level[i] - level[j] != 1 for i, j in heard)
    scored = level.keys() if told else set()
    assert {i for i, reward in enumerate(played.rewards) if reward is not None} == set(scored)
    low, high = (end((qualities[i] for i in scored), default=0) for end in (min, max))
    for i in scored if low < high else ():
        assert played.rewards[i] == pytest.approx(2 * (qualities[i] - low) / (high - low) - 1)


# RankBuffer with expected positions


@given(QUALITIES, CASES, st.booleans(), st.booleans())
def test_rankbuffer_soft_of_a_judge_without_doubt_is_coarse_only(qualities, case, bootstrap, content):
    group, settings = make(qualities), dict(bootstrap=bootstrap, anchor_content=content)
    coarse = play(RankBuffer(fine=False, **settings), group, faulty(case)).score
    assert play(RankBufferSoft(**settings), group, faulty(case)).score == coarse


@given(QUALITIES, st.integers(0, 9999), st.sampled_from([0.0, 0.3]))
@example([1, 2, 3, 4, 5, 6, 7, 8], 0, 0.0)
def test_rankbuffer_soft_places_each_rollout_at_its_expected_position(qualities, seed, share):
    """Rollouts of one quality have the same probabilities, so they tie."""

    def doubt(text: str) -> dict[str, float]:
        drawn = random.Random(f"{seed} {text.partition('.')[0]}")
        return shares({str(p): 3 * drawn.random() for p in range(5)})

    def answer(prompt: str):
        text = RESPONSE_LINES.findall(prompt)[-1]
        chances = doubt(text)
        word = max(chances, key=chances.get)
        told = None if fails((seed, share), text) else spelled('{"position": ', (word, chances), "}")
        return f'{{"position": {word}}}', told

    group = make(qualities)
    score = play(RankBufferSoft(refine_at=2), group, answer).score
    heard = [r for r in group.answered if not fails((seed, share), r.text)]
    means = {r.id: sum(int(p) * chance for p, chance in doubt(r.text).items()) for r in heard}
    n = len(heard) + len(group.empty)
    for r in heard:
        below = sum(means[i] < means[r.id] - 1e-9 for i in means) + len(group.empty)
        ties = sum(abs(means[i] - means[r.id]) < 1e-9 for i in means) - 1
        assert score.rewards[r.id] == pytest.approx(2 * (below + ties / 2) / (n - 1) - 1 if n > 1 else 0)
    assert {score.rewards[r.id] for r in group.answered if r not in heard} <= {None}
    rising = sorted(heard, key=lambda r: round(means[r.id], 9))  # as sampled where they tie
    said = {r.id: int(max(doubt(r.text), key=doubt(r.text).get)) for r in heard}
    sigma = [[r for r in rising if said[r.id] == p] for p in range(5)]
    assert score.positions == {r.id: p for p, interval in enumerate(sigma) for r in interval}
    after = score.before.update(sigma, 0, 0, refine_at=2) if heard else score.before
    assert score.after == after.visited() and score.fine_ranked == any(len(each) > 1 for each in sigma)
    with pytest.raises(SettingsError, match="has no argument 'fine'"):
        load_method("rankbuffer_soft", {"fine": True}, 0)


def test_checked_takes_what_a_server_has_rounded_above_a_probability_of_one():
    assert checked_logprob("A", SLACK) == 0.0 and checked_logprob("A", -SLACK) == -SLACK
    for logprob in (2 * SLACK, math.nan):
        with pytest.raises(ProbabilityError, match="which is none"):
            checked_logprob("A", logprob)


def several(*texts: str, cut: tuple[int, ...] = ()) -> tuple[Reply, ...]:
    return tuple(Reply(text, Usage(), i in cut) for i, text in enumerate(texts))


def test_read_samples_are_shares_of_what_could_be_read():
    said = ['{"winner": "B"}', "B!", '{"winner": "A"}', '{"winner": "B"}', '{"winner": "B"}']
    reading = read_samples(A_OR_B, several(*said))
    assert (reading.value, reading.outside, reading.shared) == ("B", pytest.approx(1 / 5), 0)
    assert reading.chances == {"A": pytest.approx(1.5 / 5), "B": pytest.approx(3.5 / 5)}
    ratings = read_samples(score_verdict(9), several(*(f'{{"score": {each}}}' for each in (9, 7, 7, 9))))
    assert ratings.value == 9 and ratings.mean == pytest.approx((4 * 8 + 4.5) / 5), "drawn to the middle by one answer"
    hard = pointwise_question(QUERY, "an answer")
    reply = Reply('{"score": 7}', Usage(), samples=several('{"score": 7}', '{"score": 9}', '{"score": 9}'))
    assert hard.read_reply(reply) == 7 and replace(hard, soft=True).read_reply(reply).value == 9
    with pytest.raises(VerdictError, match="one flat JSON object"):
        read_samples(A_OR_B, several("B", "b"))
    draft = 'It looks like {"winner": "A"}, so'
    reading = read_samples(A_OR_B, several(draft, draft, '{"winner": "B"} as', cut=(0, 1, 2)))
    assert (reading.value, reading.outside) == ("B", pytest.approx(2 / 3)), "thoughts that were cut off are no votes"
