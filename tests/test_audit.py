"""The audit: measures by hand, judges of known behaviour, the command."""

import asyncio
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from statistics import fmean

import pytest
from conftest import QUICKSTART, ROOT
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.audit.command import AuditConfig, costs, form_of, main
from rankbuffer_trl.audit.figure import audit_figure
from rankbuffer_trl.audit.measures import (
    MEASURES,
    best_constant,
    displacement,
    flips,
    interval,
    ordering_tau,
    own_distance,
    pair_win_rates,
    position_bias,
    tau_b,
)
from rankbuffer_trl.audit.probes import QueryVerdicts, ask_everything, orders_shown
from rankbuffer_trl.audit.results import Audit, Cost, Form, Result, verdict
from rankbuffer_trl.audit.terminal import measure_table
from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.judge import Call, Judge, TransportError, Usage
from rankbuffer_trl.judge.verdicts import order_verdict

HOWTO = str(QUICKSTART / "howto.jsonl")
N = 7

# Judges of known behaviour. A response is `worth 3`; a judge sees what a question shows, in the order shown.


class Client:
    """A chat client that answers a question about places shown: a list for an order, a number for a position."""

    name = "scripted judge"

    def __init__(self, position, order):
        self.position, self.order = position, order
        self.questions = []

    async def complete(self, messages, *, question, seed, tally):
        self.questions.append(question)
        tally.attempts += 1
        await asyncio.sleep(0)
        texts = {name: [worth(text) for _, text in blocks] for name, blocks in question.responses.items()}
        if question.kind == "insert":
            answer = self.position(texts["{ORDERED_ANCHOR_BLOCKS}"], *texts["{CANDIDATE_RESPONSE}"])
            return json.dumps({"position": answer}), Usage(100, 60, 4)
        return json.dumps({"order": self.order(texts["{CANDIDATE_BLOCKS}"])}), Usage(200, 0, 20)

    async def close(self):
        pass


def worth(text: str) -> int:
    return int(text.split()[1])


def true_position(anchors, candidate):
    return sum(anchor < candidate for anchor in anchors)


def true_order(worths):
    return sorted(range(len(worths)), key=lambda place: worths[place])


def as_shown(worths):
    return list(range(len(worths)))


def make_queries(count: int, n: int = N) -> list[Query]:
    return [
        Query(
            id=f"q{i}",
            prompt=[{"role": "user", "content": "?"}],
            rubrics=(Rubric("Is worth much.", 3),),
            responses=tuple(f"worth {place}" for place in range(n)),
        )
        for i in range(count)
    ]


def examine(client, queries, pairwise=2, seed=0, **kwargs):
    """The verdicts and the calls that they took."""
    return asyncio.run(ask_everything(Judge(client, **kwargs), queries, pairwise, seed))


def results(answers) -> dict[str, Result]:
    return {measure.name: measure.result(answers, seed=0) for measure in MEASURES}


def values(answers) -> dict[str, float | None]:
    return {name: result.value for name, result in results(answers).items()}


def make_audit(answers, calls) -> Audit:
    return Audit(
        judge="j",
        dataset="d.jsonl",
        queries=len(answers),
        pairwise_queries=sum(bool(one.pairs) for one in answers),
        results=list(results(answers).values()),
        form=form_of(calls),
        costs=costs(calls),
        seconds=1.0,
        moves=[(one.n, place, p) for one in answers for place, p in enumerate(one.put_back) if p is not None],
        max_failures=0.25,
    )


def test_a_perfect_judge_gets_the_best_value_of_every_measure():
    answers, _ = examine(Client(true_position, true_order), make_queries(6))
    assert values(answers) == {
        "self_insertion": 1,
        "self_insertion_distance": 0,
        "put_back": 1,
        "put_back_distance": 0,
        "reshown_tau": 1,
        "reshown_identical": 1,
        "position_bias": 0,
        "data_tau": 1,
        "pairwise_tau": 1,
        "pairwise_data_tau": 1,
        "pairwise_flips": 0,
    }
    assert all(result.clear for result in results(answers).values() if result.better)


def test_each_measure_stands_beside_what_chance_gives():
    answers, _ = examine(Client(true_position, true_order), make_queries(2, n=4))
    assert {name: result.chance for name, result in results(answers).items()} == {
        "self_insertion": 2 / 4,
        "self_insertion_distance": 2 / 4,  # always 2: 1 0 0 1
        "put_back": 1 / 4,
        "put_back_distance": 4 / 4,  # always 2: 2 1 0 1
        "reshown_tau": 0,
        "reshown_identical": 1 / 24,
        "position_bias": 0,
        "data_tau": 0,
        "pairwise_tau": 0,
        "pairwise_data_tau": 0,
        "pairwise_flips": 1 / 2,
    }


def test_a_judge_that_takes_the_order_shown_for_the_verdict_is_found_out():
    answers, _ = examine(Client(lambda anchors, candidate: 0, as_shown), make_queries(6))
    measured = results(answers)
    assert values(answers) == {
        "self_insertion": pytest.approx(1 / 7),  # position 0 lies beside the worst alone
        "self_insertion_distance": 3,  # 0, 1, ... 6
        "put_back": pytest.approx(1 / 7),
        "put_back_distance": 3,
        "reshown_tau": fmean(ordering_tau(*one.shown) for one in answers),
        "reshown_identical": 0,
        "position_bias": 1,
        "data_tau": pytest.approx(0),
        "pairwise_tau": 0,  # every pair is won once by each: an order of nothing
        "pairwise_data_tau": 0,
        "pairwise_flips": 1,
    }
    assert not any(result.clear for result in measured.values())


def test_a_judge_that_prefers_what_is_shown_first_has_the_opposite_position_bias():
    answers, _ = examine(Client(true_position, lambda worths: as_shown(worths)[::-1]), make_queries(3))
    assert values(answers)["position_bias"] == -1


def test_always_the_same_position_is_exactly_chance_and_not_clear():
    answers, _ = examine(Client(lambda anchors, candidate: 3, true_order), make_queries(20), pairwise=0)
    measured = results(answers)
    expected = {
        "self_insertion": 2 / 7,  # places 2 and 3
        "self_insertion_distance": 9 / 7,  # 2 1 0 0 1 2 3
        "put_back": 1 / 7,
        "put_back_distance": 12 / 7,  # 3 2 1 0 1 2 3
    }
    for name, value in expected.items():
        assert measured[name].value == pytest.approx(value)
        assert measured[name].chance == pytest.approx(value)
        assert not measured[name].clear


def test_a_judge_that_ranks_backwards_is_consistent_but_agrees_with_nothing():
    client = Client(
        lambda anchors, candidate: len(anchors) - true_position(anchors, candidate), lambda w: true_order(w)[::-1]
    )
    answers, _ = examine(client, make_queries(4))
    measured = results(answers)
    assert (measured["reshown_tau"].value, measured["data_tau"].value) == (1, -1)
    assert (measured["pairwise_tau"].value, measured["pairwise_data_tau"].value) == (1, -1)
    assert measured["put_back"].value == pytest.approx(1 / 7)  # the middle one
    assert measured["reshown_tau"].clear
    assert not measured["data_tau"].clear
    assert not measured["put_back"].clear


def test_a_guessing_judge_comes_out_near_chance():
    rng = random.Random(5)
    client = Client(
        lambda anchors, candidate: rng.randint(0, len(anchors)),
        lambda worths: rng.sample(range(len(worths)), len(worths)),
    )
    measured = values(examine(client, make_queries(80), pairwise=40)[0])
    assert measured["self_insertion"] == pytest.approx(2 / 8, abs=0.07)
    assert measured["put_back"] == pytest.approx(1 / 7, abs=0.06)
    assert measured["put_back_distance"] == pytest.approx((N * N - 1) / (3 * N), abs=0.3)
    assert measured["pairwise_flips"] == pytest.approx(1 / 2, abs=0.07)
    for name in ("reshown_tau", "position_bias", "data_tau", "pairwise_tau", "pairwise_data_tau"):
        assert measured[name] == pytest.approx(0, abs=0.2), name


@given(st.permutations(range(N)), st.integers(0, 10**6))
def test_an_order_by_place_alone_agrees_with_the_data_set_by_exactly_nothing(places, seed):
    shown = orders_shown(N, random.Random(seed))
    ranked = [tuple(order[place] for place in places) for order in shown]
    answers = QueryVerdicts("q", N, [None] * N, [None] * N, shown, ranked)
    assert values([answers])["data_tau"] == pytest.approx(0)


@given(st.integers(2, 12), st.integers(0, 10**6))
def test_the_two_orders_shown_are_different_permutations_and_repeatable(n, seed):
    first, second = orders_shown(n, random.Random(seed))
    assert sorted(first) == sorted(second) == list(range(n))
    assert first != second
    assert orders_shown(n, random.Random(seed)) == (first, second)


# What is asked.


def test_each_query_takes_as_many_questions_as_documented_and_numbers_candidates_as_they_stand():
    client = Client(true_position, true_order)
    answers, calls = examine(client, make_queries(3), pairwise=1)
    kinds = Counter((question.query_id, question.kind) for question in client.questions[1:])  # after the first trial
    each = {(f"q{i}", kind): count for i in range(3) for kind, count in (("insert", 2 * N), ("fine", 2))}
    assert kinds == each | {("q0", "pair"): N * (N - 1)}
    assert len(calls) == kinds.total()
    orders = {one.query_id: list(one.shown) for one in answers}
    for question in client.questions:
        if question.kind != "insert":
            headings, texts = zip(*question.responses["{CANDIDATE_BLOCKS}"], strict=True)
            assert headings == tuple(f"R{place}" for place in range(len(texts)))
            assert question.verdict == order_verdict(range(len(texts)))
        if question.kind == "fine":
            orders[question.query_id].remove(tuple(map(worth, texts)))
    assert not any(orders.values())


def test_a_response_is_asked_about_among_all_and_among_the_others():
    client = Client(true_position, true_order)
    examine(client, make_queries(1, n=3), pairwise=0)
    ladders = [
        (worth(question.responses["{CANDIDATE_RESPONSE}"][0][1]), [worth(text) for _, text in anchors])
        for question in client.questions[1:]
        if (anchors := question.responses.get("{ORDERED_ANCHOR_BLOCKS}"))
    ]
    assert ladders == [(0, [0, 1, 2]), (1, [0, 1, 2]), (2, [0, 1, 2]), (0, [1, 2]), (1, [0, 2]), (2, [0, 1])]


def test_the_order_in_which_queries_are_drawn_does_not_change_what_is_shown():
    def shown(queries):
        answers, _ = examine(Client(true_position, true_order), queries)
        return {one.query_id: one.shown for one in answers}

    queries = make_queries(5)
    assert shown(queries) == shown(queries[::-1])
    assert len(set(shown(queries).values())) > 1


# Judges that fail.


class Failing(Client):
    """Fails where told, after the first question."""

    def __init__(self, fails):
        super().__init__(true_position, true_order)
        self.fails = fails

    async def complete(self, messages, *, question, seed, tally):
        answer = await super().complete(messages, question=question, seed=seed, tally=tally)
        if len(self.questions) > 1 and self.fails(question):
            raise TransportError("connection refused")
        return answer


def test_a_judge_that_dies_after_its_first_answer_gets_no_scores(tmp_path):
    answers, calls = examine(Failing(lambda question: True), make_queries(3))
    assert all(value is None for value in values(answers).values())
    audit = make_audit(answers, calls)
    assert verdict(audit) == "Nothing could be measured: the judge gave no verdicts to measure."
    assert json.loads(json.dumps(audit.as_dict(), allow_nan=False))["of"] == 0
    audit_figure(tmp_path / "audit.png", audit)
    assert measure_table(audit).row_count == len(MEASURES)


def test_failures_are_left_out_of_the_measures():
    def fails(question):
        texts = [worth(text) for blocks in question.responses.values() for _, text in blocks]
        if question.kind == "insert":
            return worth(question.responses["{CANDIDATE_RESPONSE}"][0][1]) == 2
        if question.kind == "fine":
            return question.query_id == "q1" and texts[0] > texts[-1]
        return texts == [5, 1]

    queries = make_queries(3)
    answers, calls = examine(Failing(fails), queries)
    measured = results(answers)
    assert values(answers) == values(examine(Client(true_position, true_order), queries)[0])
    assert [one.inserted for one in answers] == [[0, 1, None, 3, 4, 5, 6]] * 3
    assert sorted(map(bool, answers[1].ranked)) == [False, True]  # the better one stands first in one order of the two
    assert list(measured["data_tau"].values) == ["q0", "q2"]
    assert answers[0].pairs[5, 1] is None
    assert answers[0].pairs[1, 5] == 5
    failed = 3 * 2 + 1 + 2
    answered = len(calls) - failed
    assert form_of(calls) == Form(len(calls), failed, failed, answered, 0)


def test_a_verdict_on_one_presentation_alone_is_not_measured():
    answers = QueryVerdicts("q", 3, [None] * 3, [None] * 3, ((0, 2, 1), (2, 0, 1)), [(0, 1, 2), None], {(0, 1): 1})
    assert all(value is None for value in values([answers]).values())


def test_first_answers_without_the_form_are_counted_but_transport_retries_are_not():
    class Sloppy(Client):
        async def complete(self, messages, *, question, seed, tally):
            answer, usage = await super().complete(messages, question=question, seed=seed, tally=tally)
            tally.attempts += 3  # transport retries
            return ("let me see" if question.kind == "fine" and seed == 0 else answer), usage

    asked = 4 * (2 * N + 2)
    answers, calls = examine(Sloppy(true_position, true_order), make_queries(4), pairwise=0)
    assert form_of(calls) == Form(asked, 0, 0, asked, 4 * 2)
    assert values(answers)["data_tau"] == 1
    answers, calls = examine(Sloppy(true_position, true_order), make_queries(4), pairwise=0, max_attempts=1)
    assert form_of(calls) == Form(asked, 4 * 2, 0, asked, 4 * 2)
    assert values(answers)["data_tau"] is None


def test_costs_are_means_of_all_attempts_by_kind():
    def call(kind, outcome, prompt, seconds):
        usage = Usage(prompt, 10, 4)
        return Call("m", kind, "q", "s", outcome, 1, usage if outcome == "parsed" else Usage(), usage, seconds)

    calls = [
        call("insert", "parsed", 100, 1.0),
        call("fine", "parsed", 300, 9.0),
        call("insert", "malformed", 200, 2.0),
    ]
    assert costs(calls) == [Cost("fine", 1, 300, 10, 4, 9.0, 9.0), Cost("insert", 2, 150, 10, 4, 1.5, 1.95)]


# Measures.


def slow_tau_b(x, y):
    """From the textbook: (P - Q) / sqrt((n0 - n1) (n0 - n2))."""
    n = len(x)
    concordant = discordant = 0
    for i in range(n):
        for j in range(n):
            if x[i] < x[j] and y[i] < y[j]:
                concordant += 1
            if x[i] < x[j] and y[i] > y[j]:
                discordant += 1
    ties = [sum(count * (count - 1) // 2 for count in Counter(scores).values()) for scores in (x, y)]
    n0 = n * (n - 1) // 2
    bottom = (n0 - ties[0]) * (n0 - ties[1])
    return (concordant - discordant) / math.sqrt(bottom) if bottom else 0.0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_tau_b_is_the_textbooks(pairs):
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    assert tau_b(x, y) == pytest.approx(slow_tau_b(x, y), abs=1e-12)
    assert tau_b(x, y) == pytest.approx(tau_b(y, x))
    assert tau_b(x, [-b for b in y]) == pytest.approx(-tau_b(x, y))


@pytest.mark.parametrize(
    ("x", "y", "tau"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),
        ([1, 2, 2, 3], [1, 2, 3, 3], 4 / 5),
        ([1, 1, 1], [1, 2, 3], 0),
    ],
)
def test_tau_b_of_small_orders(x, y, tau):
    assert tau_b(x, y) == pytest.approx(tau)


def test_tau_of_orders_compares_places_not_names():
    # 2 0 1 and 0 2 1, worst to best: the pair (0, 2) is turned, the two others are not
    assert ordering_tau((2, 0, 1), (0, 2, 1)) == pytest.approx(1 / 3)


def test_win_rates_are_shares_of_the_comparisons_that_have_a_verdict():
    pairs = {(0, 1): 1, (1, 0): 0, (0, 2): 2, (2, 0): None, (1, 2): 2, (2, 1): 2}
    assert pair_win_rates(3, pairs) == [1 / 3, 1 / 4, 1]
    assert pair_win_rates(3, {(0, 1): 1, (1, 0): 1}) is None
    assert pair_win_rates(3, {}) is None


def test_flips_count_pairs_with_both_verdicts():
    pairs = {(0, 1): 1, (1, 0): 0, (0, 2): 2, (2, 0): None, (1, 2): 2, (2, 1): 2}
    assert flips(QueryVerdicts("q", 3, [], [], ((), ()), [None, None], pairs)) == 1 / 2


def test_position_bias_is_the_slope_of_ranks_on_places():
    # Shown last instead of first, response 0 gains a rank; shown first instead of last, response 2 keeps its own.
    answers = QueryVerdicts("q", 3, [], [], ((0, 1, 2), (2, 1, 0)), [(0, 1, 2), (1, 0, 2)])
    assert position_bias(answers) == pytest.approx((2 * 1 + 0 * -1 + -2 * 0) / 8)


@pytest.mark.parametrize(
    ("n", "own", "back"), [(2, 0, 1 / 2), (3, 1 / 3, 2 / 3), (4, 2 / 4, 4 / 4), (7, 9 / 7, 12 / 7)]
)
def test_the_best_constant_position_is_the_middle(n, own, back):
    assert best_constant(n, own_distance) == pytest.approx(own)
    assert best_constant(n, displacement) == pytest.approx(back)


def test_a_response_may_stand_on_either_side_of_itself():
    assert [own_distance(given, 2) for given in range(6)] == [2, 1, 0, 0, 1, 2]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.integers(0, 5))
def test_an_interval_lies_within_the_values_and_repeats(numbers, seed):
    low, high = interval(numbers, seed, resamples=50)
    assert min(numbers) - 1e-9 <= low <= high <= max(numbers) + 1e-9
    assert interval(numbers, seed, resamples=50) == (low, high)


def test_an_interval_is_as_wide_as_theory_says():
    low, high = interval([0.0, 1.0] * 50, seed=0)
    assert (low, high) == (pytest.approx(0.5 - 1.96 * 0.05, abs=0.02), pytest.approx(0.5 + 1.96 * 0.05, abs=0.02))
    assert interval([0.5], seed=0) is None


@pytest.mark.parametrize(
    ("better", "low", "high", "clear"),
    [(1, 0.51, 0.9, True), (1, 0.5, 0.9, False), (1, 0.5 + 1e-12, 0.5 + 1e-12, False), (1, 0.1, 0.2, False)]
    + [(-1, 0.1, 0.49, True), (-1, 0.1, 0.5, False), (-1, 0.6, 0.7, False), (0, 0.6, 0.7, False)],
)
def test_clear_is_a_whole_interval_on_the_better_side_of_chance(better, low, high, clear):
    assert Result("m", "m", "", better, True, {"a": low, "b": high}, low, high, 0.5).clear is clear


def test_the_verdict_says_on_what_and_by_what_rule():
    queries = make_queries(12)
    audit = make_audit(*examine(Client(true_position, true_order), queries))
    assert verdict(audit).startswith("Clearly better than chance on 6 of 6.")
    audit = make_audit(*examine(Client(true_position, true_order), queries, pairwise=0))
    assert verdict(audit).startswith("Clearly better than chance on 4 of 4.")
    audit = make_audit(*examine(Client(true_position, as_shown), queries, pairwise=0))
    assert "on 2 of 4. Not on: shown twice, data set's order." in verdict(audit)
    audit = make_audit(*examine(Client(lambda *shown: 0, as_shown), queries))
    assert "on 0 of 6. This judge cannot be told from guessing" in verdict(audit)
    audit = make_audit(*examine(Client(true_position, true_order), queries[:1]))
    assert verdict(audit).startswith("One query is too few")


def test_queries_of_several_lengths_have_their_own_chance_and_the_figure_shows_one(tmp_path):
    queries = make_queries(2, n=2) + [
        Query(q.id + "x", q.prompt, q.rubrics, q.responses) for q in make_queries(1, n=4)
    ]
    answers, calls = examine(Client(true_position, true_order), queries)
    assert results(answers)["put_back"].chance == pytest.approx((1 / 2 + 1 / 2 + 1 / 4) / 3)
    audit_figure(tmp_path / "audit.png", make_audit(answers, calls))


# The command.


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `rankbuffer-audit` with arguments: what it printed, or its error."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["rankbuffer-audit", *map(str, arguments)])
        main()
        return capsys.readouterr()

    return run


@pytest.fixture
def refusal(command, capsys):
    """The one line with which `rankbuffer-audit` ends."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            command(*arguments)
        message = stop.value.code  # the interpreter prints a text and exits with 1
        assert isinstance(message, str)
        assert message.startswith("rankbuffer-audit: ")
        assert "\n" not in message
        assert capsys.readouterr().out == ""
        return message

    return run


def test_the_command_writes_numbers_and_a_figure_and_prints_a_verdict(command, tmp_path):
    out = tmp_path / "deep" / "audit"
    printed = command(
        "--dataset_name", HOWTO, "--queries", 4, "--pairwise_queries", 2, "--output_dir", out, "--seed", 3
    )  # fmt: skip
    assert printed.err == ""
    assert "embedded rubric judge" in printed.out
    assert "Clearly better than chance on 6 of 6." in printed.out
    assert re.search(r"put back +1\.00 +1\.00 to 1\.00 +0\.14 +yes", printed.out)
    assert (out / "audit.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    found = json.loads((out / "audit.json").read_text())
    assert found["config"]["seed"] == 3
    assert (found["queries"], found["pairwise_queries"], found["clearly_better"], found["of"]) == (4, 2, 6, 6)
    assert list(found["measures"]) == [measure.name for measure in MEASURES]
    assert found["measures"]["data_tau"]["value"] == 1
    assert len(found["measures"]["put_back"]["values"]) == 4
    assert found["form"]["questions"] == found["form"]["first_answers"] == 4 * 16 + 2 * 42
    assert {kind: cost["calls"] for kind, cost in found["cost"].items()} == {"fine": 8, "insert": 56, "pair": 84}
    assert len(found["put_back"]) == 4 * 7
    assert found["calls_per_second"] > 0


def test_a_yaml_gives_the_settings_and_the_command_line_wins(command, tmp_path):
    (tmp_path / "audit.yaml").write_text(
        f"dataset_name: {HOWTO}\nqueries: 9\npairwise_queries: 0\noutput_dir: {tmp_path}\njudge_guard: false\n"
    )
    command("--config", tmp_path / "audit.yaml", "--queries", 2, "--judge_request", '{"top_p": 1}')
    found = json.loads((tmp_path / "audit.json").read_text())
    config = found["config"]
    assert (config["queries"], config["judge_guard"], config["judge_request"]) == (2, False, {"top_p": 1})
    assert found["of"] == 4
    assert found["measures"]["pairwise_flips"]["value"] is None


def test_queries_are_drawn_by_the_seed_each_at_most_once():
    def drawn(**kwargs):
        return [query.id for query in AuditConfig(dataset_name=HOWTO, **kwargs).load()]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert len(set(drawn())) == 20
    assert sorted(drawn(queries=1000)) == sorted(
        json.loads(line)["query_id"] for line in Path(HOWTO).read_text().splitlines()
    )


def test_data_without_responses_are_refused_in_one_line(refusal, howto, tmp_path):
    path = tmp_path / "bare.jsonl"
    path.write_text(json.dumps({key: howto[0][key] for key in ("query_id", "prompt", "rubrics")}) + "\n")
    said = refusal("--dataset_name", path, "--output_dir", tmp_path / "out")
    assert "'responses' (worst to best)" in said and "make it with recipes/generate_responses.py" in said
    path.write_text(json.dumps(howto[0] | {"responses": ["one"]}) + "\n")
    assert "responses" in refusal("--dataset_name", path, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dead_judge_is_refused_in_one_line(refusal, tmp_path):
    message = refusal(
        "--dataset_name", HOWTO, "--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "judge",
        "--judge_max_retries", 0, "--output_dir", tmp_path / "out",
    )  # fmt: skip
    assert "judge at http://127.0.0.1:9/v1" in message
    assert "failed its first question" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "dataset_name is not set"),
        (("--dataset_name", "nowhere.jsonl"), "nowhere.jsonl does not exist"),
        (("--dataset_name", HOWTO, "--queries", "0"), "queries must be at least 1"),
        (
            ("--dataset_name", HOWTO, "--queries", "3", "--pairwise_queries", "4"),
            "pairwise_queries must be in 0..queries=3",
        ),
        (("--dataset_name", HOWTO, "--judge_model", "judge"), "judge_url is not set"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line(refusal, arguments, part):
    assert part in refusal(*arguments)


def test_as_a_module_it_prints_its_error_alone_and_ends_with_1(howto, tmp_path):
    (tmp_path / "bare.jsonl").write_text(json.dumps({"query_id": "q", "prompt": howto[0]["prompt"]}) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "rankbuffer_trl.audit", "--dataset_name", str(tmp_path / "bare.jsonl")],
        cwd=ROOT,
        env=os.environ | {"HF_DATASETS_CACHE": str(tmp_path / "cache")},  # no bar for reading the file either
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"rankbuffer-audit: the audit compares .*\n", done.stderr)


def test_the_console_script_names_the_command():
    module, function = re.search(r"rankbuffer-audit = ([\w.]+):(\w+)", (ROOT / "setup.py").read_text()).groups()
    assert getattr(import_module(module), function) is main
