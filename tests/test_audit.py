"""The audit of judges of known behaviour: what is asked, what is measured, what is said."""

import asyncio
import io
import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from helpers.judges import shares, spelled
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from rankbuffer_tools.audit.command import costs, form_of
from rankbuffer_tools.audit.figure import _measure_panel, audit_figure
from rankbuffer_tools.audit.fit import Estimate, Fit
from rankbuffer_tools.audit.measures import MEASURES, pairs_with_lists, rating_noise
from rankbuffer_tools.audit.model import JudgeModel, QueryLooks
from rankbuffer_tools.audit.results import (
    ALARMED,
    ESTIMATES,
    REFERENCES,
    Audit,
    Cost,
    Form,
    Result,
    estimates,
    verdict,
)
from rankbuffer_tools.audit.samples import QueryVerdicts, ask_everything
from rankbuffer_tools.audit.terminal import estimate_table, measure_table
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, TransportError, Usage
from rankbuffer_trl.judge.verdicts import order_verdict

N = 8

# Judges of known behaviour. A sample is `worth 3`; a judge sees what a question shows, in the order shown.


class Client:
    """A chat client that answers a question about places shown: a list for an order, a number for a position."""

    name = "scripted judge"

    def __init__(self, position, order, rating=lambda worth: worth):
        self.position, self.order, self.rating = position, order, rating
        self.questions = []

    async def complete(self, messages, *, question, seed, tally):
        self.questions.append(question)
        tally.attempts += 1
        await asyncio.sleep(0)
        texts = {name: [worth(text) for _, text in blocks] for name, blocks in question.responses.items()}
        if question.kind == "score":
            return json.dumps({"score": self.rating(*texts["{RESPONSE}"])}), Usage(50, 0, 4)
        if question.kind == "insert":
            answer = self.position(texts["{ORDERED_ANCHOR_BLOCKS}"], *texts["{CANDIDATE_RESPONSE}"])
            return json.dumps({"position": answer}), Usage(100, 60, 4)
        if question.kind == "pair":
            best = self.order(texts["{RESPONSE_BLOCKS}"])[-1]
            return json.dumps({"winner": question.responses["{RESPONSE_BLOCKS}"][best][0]}), Usage(200, 0, 6)
        labels = [int(heading[1:]) for heading, _ in question.responses["{CANDIDATE_BLOCKS}"]]
        order = [labels[place] for place in self.order(texts["{CANDIDATE_BLOCKS}"])]
        return json.dumps({"order": order}), Usage(200, 0, 20)

    async def close(self):
        pass


def worth(text: str) -> int:
    found = re.match(r"worth (\d+)", text)
    return int(found[1]) if found else -1  # cut in half


def true_position(anchors, candidate):
    return sum(anchor < candidate for anchor in anchors)


def true_order(worths):
    return sorted(range(len(worths)), key=lambda place: worths[place])


def as_shown(worths):
    return list(range(len(worths)))


def make_groups(count: int, n: int = N) -> list[RolloutGroup]:
    rollouts = tuple(Rollout(i, f"worth {i}") for i in range(n))
    return [
        RolloutGroup(Query(f"q{i}", [{"role": "user", "content": "?"}], (Rubric("Is worth much.", 3),)), rollouts, 0)
        for i in range(count)
    ]


def examine(client, groups, seed=0, **kwargs):
    """The verdicts and the calls that they took."""
    return asyncio.run(ask_everything(lambda: Judge(client, **kwargs), groups, None, seed))


def results(answers) -> dict[str, Result]:
    return {measure.name: measure.result(answers, seed=0) for measure in MEASURES}


def values(answers) -> dict[str, float | None]:
    return {name: result.value for name, result in results(answers).items()}


def make_audit(answers, calls, references=False) -> Audit:
    return Audit(
        judge="j",
        dataset="d.jsonl",
        samples="s.jsonl",
        references=references,
        looks=[one.looks for one in answers],
        results=list(results(answers).values()),
        costs=costs(calls),
        moves=[(one.n, place, given) for one in answers for place, given in one.put_back if given is not None],
        max_failures=0.25,
    )


class Habitual(Client):
    """A judge of habits: lists as shown, pairs to the first one, 8 for all. Its probabilities hold an opinion.

    A point of worth, or of `reads`, is a tenth in log odds. The first place is worth 6, and label A is worth 1.
    """

    def __init__(self, reads=lambda question, worth: worth):
        super().__init__(lambda *_: 0, lambda worths: as_shown(worths)[:: 1 if len(worths) > 2 else -1], lambda _: 8)
        self.reads = reads

    async def complete(self, messages, *, question, seed, tally):
        answer, usage = await super().complete(messages, question=question, seed=seed, tally=tally)
        if not question.soft:
            return answer, usage
        ((*blocks,),) = question.responses.values()
        opinions = [0.1 * self.reads(question, worth(text)) for _, text in blocks]
        if question.kind == "score":
            weights = {str(n): n * opinions[0] + 9 * (n == 8) for n in range(10)}
        else:
            first, second = (heading for heading, _ in blocks)
            weights = {first: opinions[0] - opinions[1] + 6 + (1 if first == "A" else -1), second: 0.0}
        before, word, after = re.split(r"(\d|[AB])", answer, maxsplit=1)
        return answer, usage, False, spelled(before, (word, shares(weights)), after)


class ByLabel(Client):
    """A judge for whom A always wins a pair."""

    async def complete(self, messages, *, question, seed, tally):
        answer, usage = await super().complete(messages, question=question, seed=seed, tally=tally)
        return ('{"winner": "A"}' if question.kind == "pair" else answer), usage


def first_wins(worths):
    return as_shown(worths)[::-1]


def by_place(sign):
    return lambda worths: sorted(as_shown(worths), key=lambda place: sign * abs(2 * place - len(worths) + 1))


NAMES = (
    "lists_tau", "lists_identical", "lists_bias", "pairs_flip", "pairs_first", "pairs_label", "pairs_lists",
    "put_back", "put_back_distance", "ratings_lists", "ratings_tied", "padded", "cut",
)  # fmt: skip
PERFECT = dict(zip(NAMES, (1, 1, 0, 0, 1 / 2, 1 / 2, 1, 1, 0, 1, 0, 1 / 2, 0), strict=True))
# -1 for both lists and their reverses, and the four other pairs of lists cancel. Distances are 0, 1, ... 7.
SHOWN = dict(
    zip(NAMES, (pytest.approx(-1 / 3), 0, 1, 1, 0, 1 / 2, 1 / 2, 1 / 8, 3.5, 0, 1, 1 / 2, 1 / 2), strict=True)
)
SOFT = {measure.name for measure in MEASURES} - {*NAMES}
BETTER = {measure.name for measure in MEASURES if measure.better} - SOFT
KNOWN = {  # judges with the number of queries, values of measures, and measures not clearly better than chance
    "perfect": (Client(true_position, true_order), 6, PERFECT, set()),
    "backwards, as good as perfect since nothing here is about truth": (
        Client(lambda anchors, one: sum(a > one for a in anchors), lambda w: true_order(w)[::-1], lambda w: 8 - w),
        6, PERFECT | {"cut": 1}, set(),
    ),
    "takes the order shown for the verdict": (Client(lambda *_: 0, as_shown, lambda worth: 5), 6, SHOWN, BETTER),
    "the first shown wins": (
        Client(true_position, first_wins), 4, {"lists_bias": -1, "pairs_first": 1, "pairs_label": 1 / 2}, None,
    ),
    "likes the ends": (Client(lambda *_: 0, by_place(1), lambda worth: 5), 20, {"pairs_lists": 1 / 2}, BETTER),
    "likes the middle": (Client(lambda *_: 0, by_place(-1), lambda worth: 5), 20, {"pairs_lists": 1 / 2}, BETTER),
    "likes a label": (ByLabel(true_position, true_order), 4, {"pairs_label": 1, "pairs_first": 1}, None),
    "always gives position 3": (  # distances are 3 2 1 0 1 2 3 4
        Client(lambda *_: 3, true_order), 20, {"put_back": 1 / 8, "put_back_distance": 2},
        {"put_back", "put_back_distance"},
    ),
    "contradicts itself between kinds of question": (
        Client(true_position, lambda w: true_order(w)[:: 1 if len(w) > 2 else -1], lambda worth: 8 - worth), 6,
        {"lists_tau": 1, "pairs_flip": 0, "put_back": 1, "pairs_lists": 0, "ratings_lists": -1},
        {"pairs_lists", "ratings_lists"},
    ),
}  # fmt: skip


def test_measures_tell_judges_of_known_behaviour_apart():
    for name, (client, queries, expected, unclear) in KNOWN.items():
        measured = results(examine(client, make_groups(queries))[0])
        assert {measure: measured[measure].value for measure in expected} == expected, name
        if unclear is not None:
            assert {one for one in BETTER if not measured[one].clear} == unclear, name
        if name.startswith("likes the"):
            assert measured["lists_tau"].value < 0, name


def test_measures_stand_beside_what_chance_gives():
    answers, _ = examine(Client(true_position, true_order), make_groups(2, n=4))
    chances = (
        0,
        1 / 24,
        0,
        1 / 2,
        1 / 2,
        1 / 2,
        1 / 2,
        1 / 4,
        4 / 4,
        0,
        None,
        1 / 2,
        1 / 2,
    )  # always position 2: 2 1 0 1
    assert {name: one.chance for name, one in results(answers).items() if name in NAMES} == dict(
        zip(NAMES, chances, strict=True)
    )


@given(st.permutations(range(N)), st.permutations(range(N)), st.integers(0, 10**6))
def test_pairs_with_lists_is_a_half_for_pairs_won_by_place_alone(one, other, seed):
    order = random.Random(seed).sample(range(N), N)
    pairs = [(pair, pair[0]) for a in range(N) for b in range(N) if a != b for pair in [(a, b)]]
    looks = QueryLooks("q", [(tuple(order), tuple(one)), (tuple(order[::-1]), tuple(other))], pairs)
    assert pairs_with_lists(QueryVerdicts(looks)) == 1 / 2


# What the words hide, the probabilities tell


ONCE = "For soft pairs, one order of presentation will do."


def at_random(question, worth):
    return random.Random(f"{question.responses} {worth}").gauss(0, 5)


def test_measures_find_the_opinion_behind_the_habits_of_a_judge():
    client = Habitual()
    answers, calls = examine(client, make_groups(12))
    measured = values(answers)
    soft = [question for question in client.questions if question.soft]
    assert {question.kind for question in soft} == {"pair", "score"}
    assert {question.verdict.longest for question in soft if question.kind == "score"} == {'{"score": 9}'}
    assert [measured[name] for name in ("pairs_flip", "lists_tau", "ratings_tied")] == [1, SHOWN["lists_tau"], 1]
    leads = [abs(a - b) / 10 for one in answers for a, b in one.odds if a < b]
    assert len(leads) == 12 * 4
    expected = {
        "soft_pairs_ratings": 1, "soft_words": 1 / 2, "soft_labels": 1, "soft_pairs_lists": 1 / 2,
        "soft_ratings_lists": 0, "soft_gain": 0, "soft_place": pytest.approx(7),
        "soft_place_spread": pytest.approx(0),
    }  # fmt: skip
    assert {name: measured[name] for name in expected} == expected
    assert min(leads) <= measured["soft_opinion"] <= max(leads)
    assert (measured["padded"], measured["cut"]) == (1 / 2, 0), "it says A to all of them"
    audit = make_audit(answers, calls)
    assert "on 0 of 5. This judge's words cannot be told from guessing: do not train with them." in verdict(audit)
    assert "Its probabilities can: use beyond/ratings_soft.yaml or beyond/pairs_soft.yaml." in verdict(audit)
    assert verdict(audit).endswith(f"agree on 100% of pairs, and by its words on 50%. {ONCE}")
    wandering = [
        replace(one, odds={(a, b): lead + 9 * (a + b) for (a, b), lead in one.odds.items()}) for one in answers
    ]
    assert verdict(make_audit(wandering, calls)).endswith("both orders are needed.")
    assert measure_table(audit).row_count == len(MEASURES)


def test_rating_noise_is_that_of_ratings_as_reliable_as_log_odds():
    luck, answers = random.Random(0), []
    for _ in range(3000):
        worth = [luck.gauss(5, 1) for _ in range(4)]
        means = [each + luck.gauss(0, 0.6) for each in worth]
        leads = {(i, j): 0.1 * (worth[i] - worth[j] + luck.gauss(0, 0.6 * 2**0.5)) for i, j in ((0, 1), (2, 3))}
        odds = {shown: lead + 0.4 for (i, j), one in leads.items() for shown, lead in (((i, j), one), ((j, i), -one))}
        answers.append(QueryVerdicts(QueryLooks("q", [], [], means=means), odds=odds))
    assert rating_noise(answers) == pytest.approx(0.6 * 2 / 9, rel=0.03)
    assert rating_noise([]) is None


def test_verdict_takes_no_noise_in_probabilities_for_an_opinion():
    for blind in (Habitual(lambda *_: 0), Habitual(at_random)):
        answers, calls = examine(blind, make_groups(12))
        said = verdict(make_audit(answers, calls))
        assert "This judge cannot be told from guessing: do not train with it." in said
        assert said.endswith("These probabilities cannot be told from guessing.")


def test_verdict_says_whether_probabilities_beat_words_at_the_same_price():
    coarse, fine = Habitual(), Habitual()
    for client in (coarse, fine):
        client.position, client.order = true_position, true_order
    fine.rating = lambda worth: worth
    price = "At the same price, ratings by probabilities agree"
    for client, end in ((coarse, "better with the lists, by 1.00 in tau."), (fine, "no better with the lists.")):
        answers, calls = examine(client, make_groups(6))
        said, measured = verdict(make_audit(answers, calls)), values(answers)
        assert (measured["soft_pairs_lists"], measured["soft_ratings_lists"]) == (1, 1)
        assert "agree on 100% of pairs, and by its words" in said and said.endswith(f"{price} {end} {ONCE}")


def test_ask_everything_goes_on_with_words_where_there_are_no_probabilities(caplog):
    class Refusing(Client):
        async def complete(self, messages, *, question, seed, tally):
            if getattr(question, "soft", False):
                raise TransportError("HTTP 400: logprobs are not supported")
            return await super().complete(messages, question=question, seed=seed, tally=tally)

    for kind, why in ((Client, "its answers come without them"), (Refusing, "logprobs are not supported")):
        client = kind(true_position, true_order)
        caplog.clear()
        answers, calls = examine(client, make_groups(2))
        assert [why in line for line in caplog.messages] == [True]
        assert values(answers)["lists_tau"] == 1 and not any(call.failed for call in calls)
        assert not any(values(answers)[name] for name in SOFT)
        rated = [question for question in client.questions[2:] if question.kind == "score"]
        assert {question.verdict.longest for question in rated} == {'{"score": 10}'}


def test_ask_everything_keeps_the_word_of_an_answer_whose_probabilities_are_lost():
    class Losing(Habitual):
        async def complete(self, messages, *, question, seed, tally):
            reply = await super().complete(messages, question=question, seed=seed, tally=tally)
            shown = [worth(text) for blocks in question.responses.values() for _, text in blocks]
            return reply[:2] if sum(shown) % 3 == 1 else reply

    answers, calls = examine(Losing(), make_groups(4))
    assert not any(call.attempts > 1 for call in calls)
    assert 0 < sum(len(one.odds) for one in answers) < 4 * 8 and not any(one.looks.means for one in answers)
    assert all(one.looks.scores == [8] * N and None not in dict(one.looks.pairs).values() for one in answers)


def test_ask_everything_asks_for_probabilities_although_the_trial_has_no_verdict():
    class Fumbling(Habitual):
        async def complete(self, messages, *, question, seed, tally):
            reply = await super().complete(messages, question=question, seed=seed, tally=tally)
            return ("8 or so", *reply[1:]) if question.kind == "score" else reply

    answers, _ = examine(Fumbling(), make_groups(2), max_attempts=1)
    assert [(len(one.odds), len(one.crossed_odds), one.looks.means) for one in answers] == [(8, 2, [])] * 2


def test_ask_everything_reads_probabilities_again_from_its_log(tmp_path):
    first, second = Habitual(), Habitual()
    runs = [
        asyncio.run(ask_everything(lambda client=client: Judge(client), make_groups(2), tmp_path / "log", 0))[0]
        for client in (first, second)
    ]
    assert runs[0] == runs[1] and runs[1][0].looks.means and not second.questions


# What is asked. The balance of the design is in test_audit_samples.py.


def test_each_query_takes_as_many_questions_as_documented_and_numbers_candidates_as_they_stand():
    client = Client(true_position, true_order)
    _, calls = examine(client, make_groups(12))
    kinds = Counter((question.query_id, question.kind) for question in client.questions[2:])  # after two trials
    each = {(f"q{i}", kind): n for i in range(12) for kind, n in (("look", 4), ("pair", 10), ("score", N))}
    each |= {(f"q{i}", kind): n for i in range(6) for kind, n in (("insert", N), ("pair", 14))}
    assert kinds == each
    assert len(calls) == kinds.total() == 12 * 22 + 6 * 12
    crossed = 0
    for question in client.questions:
        blocks = question.responses.get("{CANDIDATE_BLOCKS}") or question.responses.get("{RESPONSE_BLOCKS}", ())
        headings = [heading for heading, _ in blocks]
        crossed += headings == ["B", "A"]
        if question.kind == "look":
            assert headings == [f"R{slot}" for slot in range(N)] and question.verdict == order_verdict(range(N))
        assert question.kind != "pair" or headings in (["A", "B"], ["B", "A"])
    assert crossed == 12 * 2


def test_a_sample_is_put_back_among_the_others_as_the_lists_ranked_them():
    client = Client(true_position, lambda worths: true_order(worths)[::-1])
    examine(client, make_groups(1, n=4))
    ladders = [
        (worth(question.responses["{CANDIDATE_RESPONSE}"][0][1]), [worth(text) for _, text in anchors])
        for question in client.questions
        if (anchors := question.responses.get("{ORDERED_ANCHOR_BLOCKS}"))
    ]
    assert ladders == [(3, [2, 1, 0]), (2, [3, 1, 0]), (1, [3, 2, 0]), (0, [3, 2, 1])]


def test_the_order_in_which_queries_are_drawn_does_not_change_what_is_shown():
    def shown(groups):
        answers, _ = examine(Client(true_position, true_order), groups)
        return {one.looks.query_id: one.looks for one in answers}

    groups = make_groups(5)
    assert shown(groups) == shown(groups[::-1])
    assert len({each.lists[0][0] for each in shown(groups).values()}) > 1


# Judges that fail.


class Failing(Client):
    """Fails where told, after two trials."""

    def __init__(self, fails, trials=2):
        super().__init__(true_position, true_order)
        self.fails, self.trials = fails, trials

    async def complete(self, messages, *, question, seed, tally):
        answer = await super().complete(messages, question=question, seed=seed, tally=tally)
        if len(self.questions) > self.trials and self.fails(question):
            raise TransportError("connection refused")
        return answer


def test_a_judge_that_dies_after_its_first_answers_gets_no_scores(tmp_path):
    with pytest.raises(JudgeError, match="failed its first question"):
        examine(Failing(lambda question: True, trials=1), make_groups(3))
    answers, calls = examine(Failing(lambda question: True), make_groups(3))
    assert all(value is None for value in values(answers).values())
    audit = make_audit(answers, calls)
    assert verdict(audit) == "Nothing could be measured: the judge gave no verdicts to measure."
    assert json.loads(json.dumps(audit.as_dict(), allow_nan=False))["of"] == 0
    audit_figure(tmp_path / "audit.png", audit)
    assert measure_table(audit).row_count == len(NAMES), "no row about probabilities that nobody gave"


def test_failures_are_left_out_of_the_measures():
    def fails(question):
        texts = [worth(text) for blocks in question.responses.values() for _, text in blocks]
        if question.kind == "insert":
            return worth(question.responses["{CANDIDATE_RESPONSE}"][0][1]) == 2
        if question.kind == "look":  # the better one of two stands first in two of the four lists
            return question.query_id == "q1" and texts[0] > texts[-1]
        if question.kind == "score":
            return question.query_id == "q2" and texts == [3]
        return question.query_id == "q0" and texts[0] > texts[1]

    groups = make_groups(3)
    answers, calls = examine(Failing(fails), groups)
    measured = results(answers)
    perfect = values(examine(Client(true_position, true_order), groups)[0])
    assert {name: values(answers)[name] for name in NAMES} == {name: perfect[name] for name in NAMES}
    assert [dict(one.put_back).get(2, "not asked") for one in answers] == [None, "not asked", None]
    assert [sum(order is None for _, order in one.looks.lists) for one in answers] == [0, 2, 0]
    assert list(measured["lists_tau"].values) == ["q0", "q2"]
    assert list(measured["pairs_flip"].values) == ["q1", "q2"]
    assert list(measured["ratings_lists"].values) == ["q0"]
    assert list(measured["cut"].values) == ["q1", "q2"]
    failed = sum(call.failed for call in calls)
    assert failed == 2 + 2 + 5 + 1 + 1
    assert form_of(calls) == Form(len(calls), failed, failed, len(calls) - failed, 0)


def test_measures_take_pairs_with_both_verdicts_and_nothing_from_one_presentation_alone():
    looks = QueryLooks("q", [((0, 2, 1), (0, 1, 2)), ((1, 2, 0), None)], [((0, 1), 1), ((1, 0), None)])
    assert all(value is None for value in values([QueryVerdicts(looks)]).values())
    pairs = {(0, 1): 1, (1, 0): 0, (0, 2): 2, (2, 0): None, (1, 2): 2, (2, 1): 2}
    measured = values([QueryVerdicts(QueryLooks("q", [], list(pairs.items())))])
    assert measured["pairs_flip"] == 1 / 2
    assert measured["pairs_first"] == 1 / 4  # of the four verdicts, one is for the sample shown first


class Sloppy(Client):
    """A judge that answers prose where told, after three transport retries."""

    prose = staticmethod(lambda question, seed: False)

    async def complete(self, messages, *, question, seed, tally):
        answer, usage = await super().complete(messages, question=question, seed=seed, tally=tally)
        tally.attempts += 3
        return ("let me see" if self.prose(question, seed) else answer), usage


def test_costs_count_answers_without_the_form_by_kind_but_not_transport_retries():
    client = Sloppy(true_position, true_order)
    client.prose = lambda question, seed: question.kind == "look" and seed == 0
    asked = {"insert": 4 * N, "look": 4 * 4, "pair": 4 * 14, "score": 4 * N}
    answers, calls = examine(client, make_groups(4))
    forms = {kind: Form(n, 0, 0, n, n if kind == "look" else 0) for kind, n in asked.items()}
    assert {cost.kind: cost.form for cost in costs(calls)} == forms
    assert values(answers)["lists_tau"] == 1
    with pytest.raises(JudgeError, match="failed its first question"):  # a list, too
        examine(client, make_groups(4), max_attempts=1)
    client.prose = lambda question, seed: question.kind == "pair"
    answers, calls = examine(client, make_groups(4), max_attempts=1)
    assert {cost.kind: cost.form for cost in costs(calls)}["pair"] == Form(56, 56, 0, 56, 56)
    assert (values(answers)["pairs_flip"], values(answers)["lists_tau"]) == (None, 1), "no verdicts of pairs"


def test_costs_are_means_of_all_attempts_by_kind():
    def call(kind, outcome, prompt, seconds):
        usage = Usage(prompt, 10, 4)
        return Call("m", kind, "q", "s", outcome, 1, usage if outcome == "parsed" else Usage(), usage, seconds)

    attempts = [("insert", "parsed", 100, 1.0), ("look", "parsed", 300, 9.0), ("insert", "malformed", 200, 2.0)]
    assert costs([call(*one) for one in attempts]) == [
        Cost("insert", Form(2, 1, 0, 1, 0), 150, 10, 4, 1.5, 1.95),
        Cost("look", Form(1, 0, 0, 1, 0), 300, 10, 4, 9.0, 9.0),
    ]


# What is said of a judge


def test_clear_is_a_whole_interval_on_the_better_side_of_chance():
    above = [(1, 0.51, 0.9, True), (1, 0.5, 0.9, False), (1, 0.5 + 1e-12, 0.5 + 1e-12, False), (1, 0.1, 0.2, False)]
    below = [(-1, 0.1, 0.49, True), (-1, 0.1, 0.5, False), (-1, 0.6, 0.7, False), (0, 0.6, 0.7, False)]
    for better, low, high, clear in above + below:
        result = Result("m", "m", "", better, True, {"a": low, "b": high}, low, high, 0.5)
        assert result.clear is clear, (better, low, high)


def test_verdict_says_on_what_and_by_what_rule():
    def said(client, queries=12, **kwargs):
        return verdict(make_audit(*examine(client, make_groups(queries)), **kwargs))

    good = Client(true_position, true_order)
    assert said(good).startswith("Clearly better than chance on 5 of 5. This judge reads the responses")
    assert said(good, references=True).endswith(REFERENCES)
    assert "on 4 of 5. Not on: put back." in said(Client(lambda *shown: 0, true_order))
    blind = said(Client(lambda *shown: 0, as_shown, lambda worth: 5))
    assert "on 0 of 5. This judge cannot be told from guessing" in blind
    assert said(good, queries=5).startswith("Too few queries to tell anything")


def test_too_few_queries_are_said_in_place_of_an_interval():
    audit = make_audit(*examine(Client(true_position, true_order), make_groups(5)))
    assert audit.as_dict()["measures"]["pairs_flip"]["too_few"]
    console = Console(width=119, file=io.StringIO())
    console.print(measure_table(audit))
    assert re.search(r"put back +1\.00 +too few queries +0\.12 +-", console.file.getvalue())
    axes = Figure().subplots()
    _measure_panel(axes, [result for result in audit.results if result.main])
    assert all(each.get_text().endswith("too few queries") for each in axes.get_yticklabels())


def test_the_model_of_the_judge_is_shown_with_its_meaning_and_its_alarm():
    model = JudgeModel(0.7, 0.2, 0.1, 0.35, 0.3, 0.8, 0.3, 0.2)
    fit = Fit(model, [replace(model, list_noise=x / 100, kappa=0.5 + x / 1000) for x in range(100)])
    calm, alarmed = (estimates(fit, alarm, None) for alarm in (False, True))
    assert list(calm) == list(ESTIMATES) and "lasting" in estimates(fit, False, Estimate(0.2, 0.1, 0.3))
    noise = calm["list_noise"]
    assert (noise.value, noise.low, noise.high) == (0.7, *(pytest.approx(x, abs=0.01) for x in (0.025, 0.965)))
    assert "looks better in 16% of looks" in noise.says  # two looks with 0.7 of noise each, one spread apart
    assert "blurs 2.0 times as much" in calm["crowd"].says
    assert [name for name, one in alarmed.items() if one.says == ALARMED] == ["kappa"]
    assert not any(one.says == ALARMED for one in calm.values())
    console = Console(width=119, file=io.StringIO())
    console.print(estimate_table(alarmed))
    assert all(one.says in console.file.getvalue() for one in alarmed.values()), "no line is broken"


def test_queries_of_several_lengths_have_their_own_chance_and_the_figure_shows_one(tmp_path):
    groups = make_groups(3, n=5)[:2] + make_groups(3, n=4)[2:]
    answers, calls = examine(Client(true_position, true_order), groups)
    assert results(answers)["put_back"].chance == pytest.approx((1 / 5 + 1 / 5 + 1 / 4) / 3)
    audit_figure(tmp_path / "audit.png", make_audit(answers, calls))
