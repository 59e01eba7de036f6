"""The audit of judges of known behaviour: what is asked, what is measured, what is said.

What must hold of a judge stands in `JUDGES`. `golden/audit.json` has every measure and verdict beside it: one column
for each judge in that order, `*` for clearly better than chance. `python tests/test_audit.py` writes the file again:
read what changed.
"""

import asyncio
import io
import json
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import ROOT
from helpers.judges import shares, spelled
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from rankbuffer_tools.audit.command import costs
from rankbuffer_tools.audit.figure import _measure_panel, audit_figure
from rankbuffer_tools.audit.measures import MEASURES, pairs_with_lists, rating_noise
from rankbuffer_tools.audit.rankings import QueryVerdicts
from rankbuffer_tools.audit.results import RECIPE_OF_RESULT, REFERENCES_NOTE, SOFT, Audit, Cost, Form, Result, verdict
from rankbuffer_tools.audit.samples import ask_everything
from rankbuffer_tools.audit.terminal import measure_table
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, TransportError, Usage
from rankbuffer_trl.judge._verdicts import order_verdict

GOLDEN = Path(__file__).parent / "golden" / "audit.json"
N = 8


def worth(text: str) -> int:
    found = re.match(r"worth (\d+)", text)
    return int(found[1]) if found else -1  # cut in half


def true_position(anchors, candidate):
    return sum(anchor < candidate for anchor in anchors)


def true_order(worths):
    return sorted(range(len(worths)), key=lambda place: worths[place])


def shown(question) -> list[list[tuple[str, str]]]:
    """The headings and texts of a question, the ladder of an insertion first."""
    return [question.responses[name] for name in sorted(question.responses, key="{CANDIDATE_RESPONSE}".__eq__)]


def worths_in(question) -> list[int]:
    return [worth(text) for blocks in shown(question) for _, text in blocks]


class Client:
    """A chat client that answers by the places shown, after three transport retries. A sample is `worth 3`.

    `edit` changes a reply, and a refusal is `None`. With `reads`, probabilities hold an opinion: a point of it is a
    tenth in log odds, the first place is worth 6, and label A is worth 1.
    """

    name = "scripted judge"

    def __init__(self, position=true_position, order=true_order, rating=lambda worth: worth, reads=None, edit=None):
        self.position, self.order, self.rating, self.reads = position, order, rating, reads
        self.edit = edit or (lambda question, seed, reply: reply)
        self.questions = []

    async def complete(self, messages, *, question, seed, tally):
        self.questions.append(question)
        tally.attempts += 4
        await asyncio.sleep(0)
        reply = self.answer(question, worths_in(question))
        if self.reads and question.soft:
            reply = (*reply, False, self.logprobs(question, reply[0]))
        if (reply := self.edit(question, seed, reply)) is None:
            raise TransportError("logprobs are not supported")
        return reply

    def answer(self, question, worths) -> tuple[str, Usage]:
        if question.kind == "score":
            return json.dumps({"score": self.rating(*worths)}), Usage(50, 0, 4)
        if question.kind == "insert":
            return json.dumps({"position": self.position(worths[:-1], worths[-1])}), Usage(100, 60, 4)
        headings = [heading for heading, _ in shown(question)[0]]
        order = [headings[place] for place in self.order(worths)]
        if question.kind == "pair":
            return json.dumps({"winner": order[-1]}), Usage(200, 0, 6)
        return json.dumps({"order": [int(heading[1:]) for heading in order]}), Usage(200, 0, 20)

    def logprobs(self, question, answer: str) -> dict:
        opinions = [0.1 * self.reads(question, each) for each in worths_in(question)]
        if question.kind == "score":
            weights = {str(n): n * opinions[0] + 9 * (n == 8) for n in range(10)}
        else:
            (first, _), (second, _) = shown(question)[0]
            weights = {first: opinions[0] - opinions[1] + 6 + (1 if first == "A" else -1), second: 0.0}
        before, word, after = re.split(r"(\d|[AB])", answer, maxsplit=1)
        return spelled(before, (word, shares(weights)), after)

    async def close(self):
        pass


def make_groups(count: int, n: int = N) -> list[RolloutGroup]:
    rollouts, rubrics = tuple(Rollout(i, f"worth {i}") for i in range(n)), (Rubric("Is worth much.", 3),)
    prompt = [{"role": "user", "content": "?"}]
    return [RolloutGroup(Query(f"q{i}", prompt, rubrics), rollouts, 0) for i in range(count)]


def examine(client, groups, log=None, **kwargs):
    """The verdicts and the calls that they took."""
    return asyncio.run(ask_everything(lambda: Judge(client, **kwargs), groups, log, 0))


def results(answers) -> dict[str, Result]:
    return {measure.name: measure.result(answers, seed=0) for measure in MEASURES}


def values(answers) -> dict[str, float | None]:
    return {name: result.value for name, result in results(answers).items()}


def make_audit(answers, calls, references=False) -> Audit:
    moves = [(one.n, place, given) for one in answers for place, given in one.put_back if given is not None]
    found = [*results(answers).values()]
    return Audit("j", "d.jsonl", "s.jsonl", references, answers, found, costs(calls), moves, max_failures=0.25)


def printed(table) -> str:
    console = Console(width=119, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


# Judges of known behaviour


def as_shown(worths):
    return list(range(len(worths)))


def first_wins(worths):
    return as_shown(worths)[::-1]


def by_place(sign):
    return lambda worths: sorted(as_shown(worths), key=lambda place: sign * abs(2 * place - len(worths) + 1))


def other_pairs(order):
    """A list by `order`, and the reverse of a pair."""
    return lambda worths: order(worths)[:: 1 if len(worths) > 2 else -1]


def by_worth(question, worth):
    return worth


def at_random(question, worth):
    return random.Random(f"{question.responses} {worth}").gauss(0, 5)


def of_habit(reads=by_worth, **more) -> Client:
    """Lists as shown, pairs to the first one, 8 for all. Its probabilities hold an opinion."""
    return Client(lambda *_: 0, other_pairs(as_shown), lambda _: 8, reads, **more)


def only(kind, text, seeds=range(99)):
    return lambda question, seed, reply: (text, *reply[1:]) if question.kind == kind and seed in seeds else reply


NAMES = (
    "lists_tau", "lists_identical", "lists_bias", "pairs_flip", "pairs_first", "pairs_label", "pairs_lists",
    "put_back", "put_back_distance", "ratings_lists", "ratings_tied", "padded", "cut",
)  # fmt: skip
PERFECT = dict(zip(NAMES, (1, 1, 0, 0, 1 / 2, 1 / 2, 1, 1, 0, 1, 0, 1 / 2, 0), strict=True))
THIRD = pytest.approx(-1 / 3)  # -1 for both lists and their reverses, and the four other pairs of lists cancel
SHOWN = dict(zip(NAMES, (THIRD, 0, 1, 1, 0, 1 / 2, 1 / 2, 1 / 8, 3.5, 0, 1, 1 / 2, 1 / 2), strict=True))
HABIT = SHOWN | {
    "pairs_first": 1, "cut": 0, "soft_pairs_ratings": 1, "soft_words": 1 / 2, "soft_labels": 1, "soft_gain": 0,
    "soft_pairs_lists": 1 / 2, "soft_ratings_lists": 0, "soft_place": pytest.approx(7),
    "soft_place_spread": pytest.approx(0),
}  # fmt: skip
TIED = {"soft_pairs_lists": 1, "soft_ratings_lists": 1, "soft_words": 1 / 2, "soft_gain": 1}
BLIND = {"soft_words": 1 / 2, "pairs_flip": 1}
FIRST = {"lists_bias": -1, "pairs_first": 1, "pairs_label": 1 / 2}
AGAINST = {"lists_tau": 1, "pairs_flip": 0, "put_back": 1, "pairs_lists": 0, "ratings_lists": -1}
PROSE = "let me see"
ENDS, MIDDLE = (Client(lambda *_: 0, by_place(sign), lambda _: 5) for sign in (1, -1))
BACKWARDS = Client(lambda anchors, one: sum(a > one for a in anchors), lambda w: true_order(w)[::-1], lambda w: 8 - w)
# By name: the client, its queries, values of measures, and the main measures that are clearly better than chance.
ALL, NONE = {"lists_tau", "pairs_flip", "pairs_lists", "put_back", "ratings_lists"}, set()
JUDGES = {
    "perfect": (Client(), 12, PERFECT, ALL),
    "backwards": (BACKWARDS, 6, PERFECT | {"cut": 1}, ALL),  # nothing here is about truth
    "as shown": (Client(lambda *_: 0, as_shown, lambda _: 5), 6, SHOWN, NONE),
    "the first wins": (Client(order=first_wins), 6, FIRST, {"put_back"}),
    "likes the ends": (ENDS, 20, {"pairs_lists": 1 / 2, "lists_tau": THIRD}, NONE),
    "likes the middle": (MIDDLE, 20, {"pairs_lists": 1 / 2, "lists_tau": THIRD}, NONE),
    "likes a label": (Client(edit=only("pair", '{"winner": "A"}')), 6, {"pairs_label": 1, "pairs_first": 1}, None),
    "position 3": (Client(lambda *_: 3), 20, {"put_back": 1 / 8, "put_back_distance": 2}, ALL - {"put_back"}),
    "against itself": (
        Client(order=other_pairs(true_order), rating=lambda worth: 8 - worth), 6, AGAINST,
        ALL - {"pairs_lists", "ratings_lists"},
    ),
    "five queries": (Client(), 5, PERFECT, NONE),
    "of habit": (of_habit(), 12, HABIT, NONE),
    "blind": (of_habit(lambda *_: 0), 12, BLIND, NONE),
    "at random": (of_habit(at_random), 12, BLIND, NONE),
    "tied": (Client(rating=lambda _: 8, reads=by_worth), 6, TIED, None),
    "untied": (Client(reads=by_worth), 6, TIED | {"soft_words": 1, "soft_gain": 0}, ALL),
    "prose for 8": (of_habit(edit=only("score", "8 or so")), 6, {"soft_pairs_ratings": None}, NONE),
    "prose at first": (Client(edit=only("look", PROSE, {0})), 6, PERFECT, ALL),
    "prose for pairs": (Client(edit=only("pair", PROSE)), 6, {"pairs_flip": None, "lists_tau": 1}, None),
}  # fmt: skip
MAIN = {measure.name for measure in MEASURES if measure.main}


@cache
def audited(name: str):
    client, queries, *_ = JUDGES[name]
    return examine(client, make_groups(queries), max_attempts=1 if name.startswith("prose for") else 3)


def told(name: str) -> dict:
    """All that an audit says of a judge."""
    found = {
        name: "-" if one.value is None else f"{round(one.value, 6) + 0.0:.3g}{'*' * one.clear}"
        for name, one in results(audited(name)[0]).items()
    }
    return {"verdict": verdict(make_audit(*audited(name))), "measures": found}


@pytest.mark.parametrize("name", JUDGES)
def test_measures_tell_judges_of_known_behaviour_apart(name):
    _, queries, known, clear = JUDGES[name]
    answers, calls = audited(name)
    found = results(answers)
    assert {measure: found[measure].value for measure in known} == known
    assert clear is None or {measure for measure in MAIN if found[measure].clear} == clear
    golden = json.loads(GOLDEN.read_text())
    measures = {measure: cells.split()[[*JUDGES].index(name)] for measure, cells in golden["measures"].items()}
    assert told(name) == {"verdict": golden["verdicts"][name], "measures": measures}

    each = {(f"q{i}", kind): n for i in range(queries) for kind, n in (("look", 4), ("pair", 10), ("score", N))}
    each |= {(f"q{i}", kind): n for i in range(min(6, queries)) for kind, n in (("insert", N), ("pair", 14))}
    assert Counter((call.query_id, call.kind) for call in calls) == each
    forms = {cost.kind: cost.form for cost in costs(calls)}
    for kind in forms:
        n = sum(count for (_, asked), count in each.items() if asked == kind)
        failed = n if (name, kind) in (("prose for 8", "score"), ("prose for pairs", "pair")) else 0
        malformed = n if (name, kind) == ("prose at first", "look") else failed
        assert forms[kind] == Form(n, failed, 0, n, malformed), "transport retries are none"


def test_measures_stand_beside_what_chance_gives_of_their_number_of_samples(tmp_path):
    found = results(examine(Client(), make_groups(2, n=4))[0])
    # The best constant position is 2: distances are 2 1 0 1.
    chances = 0, 1 / 24, 0, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 4, 4 / 4, 0, None, 1 / 2, 1 / 2
    assert [found[name].chance for name in NAMES] == [*chances]
    assert not any(one.better for one in MEASURES if one.chance is None), "without a chance level, no side is better"
    answers, calls = examine(Client(), make_groups(3, n=5)[:2] + make_groups(3, n=4)[2:])
    assert results(answers)["put_back"].chance == pytest.approx((1 / 5 + 1 / 5 + 1 / 4) / 3)
    (tmp_path / "audit.png").write_bytes(b"old")
    with patch("rankbuffer_trl.files.sync", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
        audit_figure(tmp_path / "audit.png", make_audit(answers, calls))
    assert (tmp_path / "audit.png").read_bytes() == b"old", "the figure is written whole or not at all"


@given(st.permutations(range(N)), st.permutations(range(N)), st.integers(0, 10**6))
def test_pairs_with_lists_is_a_half_for_pairs_won_by_place_alone(one, other, seed):
    order = random.Random(seed).sample(range(N), N)
    pairs = {(a, b): a for a in range(N) for b in range(N) if a != b}
    rankings = QueryVerdicts("q", [(tuple(order), tuple(one)), (tuple(order[::-1]), tuple(other))], pairs)
    assert pairs_with_lists(rankings) == 1 / 2


def test_measures_take_pairs_with_both_verdicts_and_nothing_from_one_presentation_alone():
    rankings = QueryVerdicts("q", [((0, 2, 1), (0, 1, 2)), ((1, 2, 0), None)], {(0, 1): 1, (1, 0): None})
    assert {*values([rankings]).values()} == {None}
    pairs = {(0, 1): 1, (1, 0): 0, (0, 2): 2, (2, 0): None, (1, 2): 2, (2, 1): 2}
    measured = values([QueryVerdicts("q", [], pairs)])
    assert (measured["pairs_flip"], measured["pairs_first"]) == (1 / 2, 1 / 4), "one of four is for the first shown"


# What the words hide, the probabilities tell


def test_rating_noise_is_that_of_ratings_as_reliable_as_log_odds():
    luck, answers = random.Random(0), []
    for _ in range(3000):
        worth = [luck.gauss(5, 1) for _ in range(4)]
        means = [each + luck.gauss(0, 0.6) for each in worth]
        leads = {(i, j): 0.1 * (worth[i] - worth[j] + luck.gauss(0, 0.6 * 2**0.5)) for i, j in ((0, 1), (2, 3))}
        odds = {shown: lead + 0.4 for (i, j), one in leads.items() for shown, lead in (((i, j), one), ((j, i), -one))}
        answers.append(QueryVerdicts("q", [], {}, means=means, odds=odds))
    assert rating_noise(answers) == pytest.approx(0.6 * 2 / 9, rel=0.03)
    assert rating_noise([]) is None


def test_verdict_wants_both_orders_of_soft_pairs_if_what_a_place_adds_differs():
    answers, calls = audited("of habit")
    leads = [abs(a - b) / 10 for one in answers for a, b in one.odds if a < b]
    assert len(leads) == 12 * 4 and min(leads) <= values(answers)["soft_opinion"] <= max(leads)
    odds = [{pair: lead + 9 * sum(pair) for pair, lead in one.odds.items()} for one in answers]
    wandering = [replace(one, odds=each) for one, each in zip(answers, odds, strict=True)]
    assert "both orders are needed." in verdict(make_audit(wandering, calls))
    rows = {name: measure_table(make_audit(*audited(name))).row_count for name in ("of habit", "perfect")}
    assert rows == {"of habit": len(MEASURES), "perfect": len(NAMES)}, "no row about probabilities that nobody gave"


def losing(question, seed, reply):
    return reply[:2] if sum(worths_in(question)) % 3 == 1 else reply


def test_ask_everything_goes_on_with_words_where_probabilities_are_not_given_or_lost(caplog):
    refusing = Client(edit=lambda question, seed, reply: None if question.soft else reply)
    for client, why in ((Client(), "its answers come without them"), (refusing, "logprobs are not supported")):
        caplog.clear()
        answers, calls = examine(client, make_groups(2))
        assert [why in line for line in caplog.messages] == [True]
        measured = values(answers)
        assert measured["lists_tau"] == 1 and not any(measured[name] for name in {*measured} - {*NAMES})
        rated = [question for question in client.questions[2:] if question.kind == "score"]
        assert {question.verdict.longest for question in rated} == {'{"score": 10}'}
        assert not any(call.failed for call in calls)
    answers, calls = examine(of_habit(edit=losing), make_groups(4))
    assert {call.attempts for call in calls} == {4}, "nothing is asked again"
    assert 0 < sum(len(one.odds) for one in answers) < 4 * 8 and not any(one.means for one in answers)
    assert all(one.scores == [8] * N and None not in one.pairs.values() for one in answers)
    fumbled = [(len(one.odds), len(one.crossed_odds), one.means) for one in audited("prose for 8")[0]]
    assert fumbled == [(8, 2, [])] * 6, "the trial had no verdict"


# What is asked. The balance of the design is in test_audit_samples.py.


def test_questions_number_candidates_as_they_stand_and_go_by_the_query_alone(tmp_path):
    client, again, groups = of_habit(), of_habit(), make_groups(5)
    first, calls = examine(client, groups, tmp_path / "log")
    assert len(client.questions) == len(calls), "the trials are not asked again"
    soft = [question for question in client.questions if question.soft]
    assert {question.kind for question in soft} == {"pair", "score"}
    assert {question.verdict.longest for question in soft if question.kind == "score"} == {'{"score": 9}'}
    headings = {kind: [] for kind in ("look", "pair", "score", "insert")}
    for question in client.questions:
        headings[question.kind].append([heading for heading, _ in shown(question)[0]])
        assert question.kind != "look" or question.verdict == order_verdict(range(N))
    assert all(each == [f"R{slot}" for slot in range(N)] for each in headings["look"])
    assert Counter(map(tuple, headings["pair"])) == {("A", "B"): 5 * (8 + 4), ("B", "A"): 5 * 2}
    assert examine(again, groups, tmp_path / "log")[0] == first and not again.questions, "all is in the log"
    turned = {one.query_id: one.as_dict() for one in examine(of_habit(), groups[::-1])[0]}
    assert turned == {one.query_id: one.as_dict() for one in first}, "whatever the order of the queries"
    assert len({one.lists[0][0] for one in first}) > 1
    client = Client(order=lambda worths: true_order(worths)[::-1])
    examine(client, make_groups(1, n=4))
    ladders = [worths_in(question) for question in client.questions if question.kind == "insert"]
    assert ladders == [[2, 1, 0, 3], [3, 1, 0, 2], [3, 2, 0, 1], [3, 2, 1, 0]], "as the lists ranked the others"


# Judges that fail


def failing(fails, trials=2) -> Client:
    client = Client(edit=lambda question, _, r: None if len(client.questions) > trials and fails(question) else r)
    return client


def test_a_judge_that_dies_after_its_first_answers_gets_no_scores(tmp_path):
    for client in (failing(lambda question: True, trials=1), Client(edit=only("look", PROSE))):
        with pytest.raises(JudgeError, match=r"failed its first question, about query '[^']+', so"):
            examine(client, make_groups(3), max_attempts=1)
    answers, calls = examine(failing(lambda question: True), make_groups(3))
    assert {*values(answers).values()} == {None}
    audit = make_audit(answers, calls)
    assert verdict(audit) == "Nothing could be measured: the judge gave no verdicts to measure."
    assert json.loads(json.dumps(audit.as_dict(), allow_nan=False))["of"] == 0
    audit_figure(tmp_path / "audit.png", audit)
    assert measure_table(audit).row_count == len(NAMES)


def test_failures_are_left_out_of_the_measures():
    def fails(question):
        worths = worths_in(question)
        if question.kind == "insert":
            return worths[-1] == 2
        if question.kind == "look":  # the better one of two stands first in two of the four lists
            return question.query_id == "q1" and worths[0] > worths[-1]
        if question.kind == "score":
            return question.query_id == "q2" and worths == [3]
        return question.query_id == "q0" and worths[0] > worths[1]

    answers, calls = examine(failing(fails), make_groups(3))
    measured = results(answers)
    assert {name: measured[name].value for name in NAMES} == PERFECT
    assert [dict(one.put_back).get(2, "not asked") for one in answers] == [None, "not asked", None]
    assert [sum(order is None for _, order in one.lists) for one in answers] == [0, 2, 0]
    left = [[*measured[name].values] for name in ("lists_tau", "pairs_flip", "ratings_lists", "cut")]
    assert left == [["q0", "q2"], ["q1", "q2"], ["q0"], ["q1", "q2"]]
    unreachable = {cost.kind: cost.form.unreachable for cost in costs(calls)}
    assert unreachable == {"insert": 2, "look": 2, "pair": 5 + 1, "score": 1}
    assert all(cost.form.first_answers == cost.form.questions - cost.form.unreachable for cost in costs(calls))


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


def test_the_first_measure_that_is_clear_names_the_recipe():
    def found(clear, references=False):
        results = [Result(n, n, "", 1, n != SOFT, {"q": 0.8}, 0.6 if n in clear else 0.4, 0.9, 0.5) for n in measured]
        return replace(make_audit([], []), results=results, references=references)

    lists, probabilities, pairs = RECIPE_OF_RESULT
    measured = [*RECIPE_OF_RESULT, "soft_words", "put_back"]
    for clear in ((lists, probabilities, pairs), (probabilities, pairs), (pairs, "put_back")):
        recipe = RECIPE_OF_RESULT[clear[0]]
        assert (ROOT / "recipes" / f"{recipe}.yaml").is_file()
        assert found(clear).train_with == recipe and verdict(found(clear)).endswith(f"for it: {recipe}.yaml.")
        assert found(clear, references=True).train_with is None, "it says nothing about rollouts"
    for clear in ((), ("put_back",)):
        assert found(clear).train_with is None and "do not train with it" in verdict(found(clear))


def test_too_few_queries_and_references_are_said():
    audit = make_audit(*audited("five queries"))
    assert audit.as_dict()["measures"]["pairs_flip"]["too_few"]
    assert re.search(r"put back +1\.00 +too few queries +0\.12 +-", printed(measure_table(audit)))
    axes = Figure().subplots()
    _measure_panel(axes, [result for result in audit.results if result.main])
    assert all(each.get_text().endswith("too few queries") for each in axes.get_yticklabels())
    assert verdict(make_audit(*audited("perfect"), references=True)).endswith(REFERENCES_NOTE)


if __name__ == "__main__":
    found = {name: told(name) for name in JUDGES}
    rows = {measure.name: [each["measures"][measure.name] for each in found.values()] for measure in MEASURES}
    cells = {name: " ".join(f"{cell:<7}" for cell in row).rstrip() for name, row in rows.items()}
    measures = ",\n".join(f"  {json.dumps(name) + ':':<22} {json.dumps(row)}" for name, row in cells.items())
    verdicts = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each['verdict'])}" for name, each in found.items())
    GOLDEN.write_text(f'{{\n "measures": {{\n{measures}\n }},\n "verdicts": {{\n{verdicts}\n }}\n}}\n')
