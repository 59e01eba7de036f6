"""Verdicts imposed on a server: each form admits the valid answers and no other, shown against slow oracles.

How answers are read is tested in `test_verdicts_read.py`.
"""

import json
import math
import re
from functools import cache
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl.judge import (
    VerdictError,
    order_verdict,
    placement_verdict,
    position_verdict,
    score_verdict,
    scores_verdict,
    selection_verdict,
    winner_verdict,
)
from rankbuffer_trl.judge.verdicts import DECODINGS, GRAMMAR_LIMIT, constrain, max_tokens


class Case:
    """A verdict beside what it was made from, which its oracle needs."""

    def __init__(self, *arguments):
        self.arguments = arguments
        self.verdict = self.make(*arguments)

    def __getattr__(self, name):
        return getattr(self.verdict, name)

    def __repr__(self):
        return f"{type(self).__name__}{self.arguments}"


class Position(Case):
    make = staticmethod(position_verdict)


class Order(Case):
    make = staticmethod(order_verdict)


class Placement(Case):
    make = staticmethod(placement_verdict)


class Score(Case):
    make = staticmethod(score_verdict)


class Scores(Case):
    make = staticmethod(scores_verdict)


class Winner(Case):
    make = staticmethod(winner_verdict)


class Selection(Case):
    make = staticmethod(selection_verdict)


IDS = st.lists(st.integers(0, 120), min_size=1, max_size=5, unique=True).map(tuple)
LONG = tuple(range(3, 3 + 2 * (GRAMMAR_LIMIT + 1), 2))
SCORED = (Score(), Scores(), Winner(("A", "B")), Winner(("A", "B", "tie")))
SHORT = (
    *SCORED,
    Position(2),
    Position(9),
    Position(12),
    Order((4,)),
    Order((4, 0, 11)),
    Order((7, 100, 1, 10)),
)
VERDICTS = (*SHORT, Order(LONG), Placement(1, 2), Placement(3, 12), Placement(GRAMMAR_LIMIT + 1, 4))
PLACEMENTS = st.builds(Placement, st.integers(1, 3), st.integers(2, 4)) | st.sampled_from([Placement(2, 12)])
every_verdict = pytest.mark.parametrize("verdict", VERDICTS, ids=str)


# Oracles


def valid_answers(case: Case) -> set[str]:
    """All of them, written out."""
    match case, *case.arguments:
        case Position(), K:
            return {json.dumps({"position": p}) for p in range(K + 1)}
        case Score(), *_:
            return {json.dumps({"score": s}) for s in range(11)}
        case Scores(), *_:
            return {json.dumps({"scores": pair}) for pair in product(range(11), repeat=2)}
        case Winner(), choices:
            return {json.dumps({"winner": choice}) for choice in choices}
        case Order(), ids:
            return {json.dumps({"order": order}) for order in permutations(ids)}
        case Placement(), n, K:
            return {json.dumps(placed(merged)) for merged in merged_orders(n, K)}
        case Selection(), anchors, rollouts, size:
            return {
                json.dumps({"keep_anchor_ids": keep, "add_rollout_ids": add})
                for kept in range(size + 1)
                for keep in permutations(anchors, kept)
                for add in permutations(rollouts, size - kept)
            }


def merged_orders(n: int, K: int) -> list[list[int | str]]:
    """Every order of `n` candidates and `K` anchors, worst to best, in which the anchors keep theirs."""
    orders: list[list[int | str]] = [[f"A{k}" for k in range(K)]]
    for candidate in range(n):
        orders = [[*each[:at], candidate, *each[at:]] for each in orders for at in range(len(each) + 1)]
    return orders


def placed(merged: list[int | str]) -> dict[str, list[int]]:
    """The verdict that stands for a merged order: the candidates in it, and how many anchors are below each."""
    at = {i: merged.index(i) for i in merged if isinstance(i, int)}
    below = {i: sum(isinstance(other, str) for other in merged[:place]) for i, place in at.items()}
    order = sorted(at, key=at.get)
    return {"order": order, "positions": [below[i] for i in order]}


def merge(order: list[int], positions: list[int], K: int) -> list[int | str]:
    """The merged order that a verdict stands for."""
    pairs = list(zip(order, positions, strict=True))
    merged = []
    for p in range(K + 1):
        merged += [i for i, position in pairs if position == p] + [f"A{p}"] * (p < K)
    return merged


def read_grammar(text: str) -> dict[str, list[list[str]]]:
    """Rules of an EBNF by name: alternatives of tokens, each `"a literal"` or the name of a rule."""
    rules = {}
    for line in text.splitlines():
        name, body = line.split(" ::= ")
        assert name not in rules, "a rule is defined once"
        tokens = re.findall(r'"(?:[^"\\]|\\.)*"|[\w|]+', body)
        assert " ".join(tokens) == body
        rules[name] = [[]]
        for token in tokens:
            if token == "|":
                rules[name].append([])
            else:
                rules[name][-1].append(token)
    return rules


def language(rules: dict[str, list[list[str]]], name: str = "root") -> list[str]:
    """Every text that a rule derives, once for each way to derive it."""
    texts = []
    for alternative in rules[name]:
        heads = [""]
        for token in alternative:
            tails = [json.loads(token)] if token.startswith('"') else language(rules, token)
            heads = [head + tail for head in heads for tail in tails]
        texts += heads
    return texts


def size(rules: dict[str, list[list[str]]]) -> int:
    """How many derivations the root has, without writing them out."""

    @cache
    def ways(token: str) -> int:
        return 1 if token.startswith('"') else sum(math.prod(map(ways, tokens)) for tokens in rules[token])

    return ways("root")


def fits(value: object, schema: dict) -> bool:
    """Whether `value` satisfies a JSON schema made of the keywords below."""
    known = {"type", "properties", "required", "additionalProperties", "enum", "items", "minItems", "maxItems"}
    assert set(schema) <= known, "this little validator must know every keyword"
    types = {"object": dict, "array": list, "integer": int, "string": str}
    if type(value) is not types[schema["type"]]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        enough = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return enough and all(fits(v, schema["items"]) for v in value)
    if isinstance(value, dict):
        assert schema["additionalProperties"] is False
        properties = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(properties) and all(
            fits(value[key], properties[key]) for key in value
        )
    return True


# Answers that are nearly valid


@st.composite
def edited(draw, answer: str) -> str:
    """`answer` after one to three small edits."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(answer)))
        cut = draw(st.integers(0, 2))
        answer = answer[:at] + draw(st.text('{}[]":, \n0123456789-.positonrdecwABR', max_size=2)) + answer[at + cut :]
    return answer


NUMBERS = st.integers(-2, 125)
VALUES = (
    NUMBERS
    | st.lists(NUMBERS, max_size=6)
    | st.lists(st.integers(-1, 11) | st.sampled_from([True, 3.0, "3"]), min_size=2, max_size=2)
    | st.sampled_from([None, True, False, "1", 1.0, [[1]], {}, "A", "B", "tie", "a", "C", ["A"]])
)
KEYS = ("position", "order", "score", "scores", "winner")
OBJECTS = st.dictionaries(st.sampled_from([*KEYS, "Position", "why"]), VALUES, max_size=2)


def nearly(case: Case) -> st.SearchStrategy[str]:
    """Texts in the neighbourhood of valid answers."""
    some = [case.longest, *sorted(valid_answers(case))[:40]]
    layouts = [{}, {"separators": (",", ":")}, {"indent": 1}, {"separators": (" , ", " : ")}]
    return st.one_of(
        st.sampled_from(some).flatmap(edited),
        st.builds(lambda answer, around: around.format(answer), st.sampled_from(some), st.sampled_from(AROUND)),
        st.builds(
            lambda answer, layout: json.dumps(json.loads(answer), **layout), *map(st.sampled_from, (some, layouts))
        ),
        OBJECTS.map(json.dumps),
    )


AROUND = ("{}\n", " {}", "{0}{0}", "```{}```", "{}.", "\n{}", "x{}")


# Positions


@given(st.data(), st.integers(2, 30))
def test_the_regex_of_a_position_matches_the_valid_answers_alone(data, K):
    verdict = Position(K)
    assert list(verdict.constraint) == ["regex"]
    valid = valid_answers(verdict)
    assert all(re.fullmatch(verdict.constraint["regex"], answer) for answer in valid)
    text = data.draw(nearly(verdict))
    assert bool(re.fullmatch(verdict.constraint["regex"], text)) == (text in valid)


@pytest.mark.parametrize("K", range(2, 31))
def test_no_number_out_of_range_is_a_position(K):
    matched = [n for n in range(-40, 400) if re.fullmatch(Position(K).constraint["regex"], f'{{"position": {n}}}')]
    assert matched == list(range(K + 1))


# Scores and winners


@pytest.mark.parametrize("verdict", SCORED, ids=str)
@given(st.data())
def test_the_regex_of_scores_and_winners_matches_the_valid_answers_alone(verdict, data):
    assert list(verdict.constraint) == ["regex"]
    valid = valid_answers(verdict)
    assert all(re.fullmatch(verdict.constraint["regex"], answer) for answer in valid)
    text = data.draw(nearly(verdict))
    assert bool(re.fullmatch(verdict.constraint["regex"], text)) == (text in valid)


def test_no_number_out_of_range_is_a_score():
    admitted = [
        n
        for n in (*range(-20, 130), "01", "1.0", "5.5", "1e1", "true", "null", '"5"', "")
        if re.fullmatch(Score().constraint["regex"], f'{{"score": {n}}}')
        or re.fullmatch(Scores().constraint["regex"], f'{{"scores": [{n}, 5]}}')
        or re.fullmatch(Scores().constraint["regex"], f'{{"scores": [5, {n}]}}')
    ]
    assert admitted == list(range(11))


NO_SCORES = ["11", "-1", "5.0", "5.5", "1e1", "true", "false", "null", '"5"', "[5]", "NaN", "Infinity", "05", "", '""']


@pytest.mark.parametrize("value", NO_SCORES)
def test_a_score_is_an_integer_from_0_to_10(value):
    for verdict, answer in (
        (Score(), f'{{"score": {value}}}'),
        (Scores(), f'{{"scores": [{value}, 5]}}'),
        (Scores(), f'{{"scores": [5, {value}]}}'),
    ):
        with pytest.raises(VerdictError):
            verdict.parse(answer)


@pytest.mark.parametrize("value", ["5", "[]", "[5]", "[5, 5, 5]", "[[5, 5]]", '"5, 5"', '{"A": 5, "B": 5}', "null"])
def test_two_responses_have_two_scores(value):
    with pytest.raises(VerdictError):
        Scores().parse(f'{{"scores": {value}}}')


def test_scores_keep_their_order():
    assert Scores().parse('{"scores": [0, 10]}') == (0, 10)
    assert Scores().parse('```json\n{"scores":[7,3]}\n```') == (7, 3)


@pytest.mark.parametrize(
    "value",
    ['"a"', '"C"', '"Tie"', '"A "', '"[A]"', '""', "true", "0", "null", '["A"]', "A", '"A or B"', '["A", "B"]'],
)
def test_a_winner_is_one_of_the_choices(value):
    with pytest.raises(VerdictError):
        Winner(("A", "B", "tie")).parse(f'{{"winner": {value}}}')


def test_a_tie_is_no_verdict_where_none_is_allowed():
    assert Winner(("A", "B", "tie")).parse('{"winner": "tie"}') == "tie"
    with pytest.raises(VerdictError, match='one of A, B, not "tie"'):
        Winner(("A", "B")).parse('{"winner": "tie"}')


@pytest.mark.parametrize(
    ("verdict", "answer", "message"),
    [
        (Score(), '{"score": 12}', "integer from 0 through 10, not 12"),
        (Scores(), '{"scores": [3, 12]}', "integer from 0 through 10, not 12"),
        (Scores(), '{"scores": [3]}', "list of two integers, not .3."),
        (Selection(("A0", "A1"), ("R0",), 2), '{"keep_anchor_ids": ["L0"], "add_rollout_ids": []}', "L0"),
        (
            Selection(("A0", "A1"), ("R0",), 2),
            '{"keep_anchor_ids": ["A0"], "add_rollout_ids": []}',
            "2 different ids in all",
        ),
    ],
)
def test_a_fault_is_named(verdict, answer, message):
    with pytest.raises(VerdictError, match=message) as caught:
        verdict.parse(answer)
    assert len(str(caught.value)) < 400


# Selections

SELECTIONS = (
    Selection(("A0", "A1", "A2", "A3"), ("R0", "R1"), 4),
    Selection(("A0", "A1", "A2", "A3"), tuple(f"R{i}" for i in range(12)), 4),
    Selection(("A0", "A1"), ("R0", "R1", "R2"), 3),
)
NAMES = st.sampled_from([*(f"A{i}" for i in range(5)), *(f"R{i}" for i in range(13)), "L0", "a0", "", "A"])
CHOSEN = st.lists(NAMES | st.sampled_from([0, None, True, ["A0"]]), max_size=5)


@settings(max_examples=300)
@given(st.sampled_from(SELECTIONS), st.data())
def test_a_selection_is_bounded_when_decoded_and_settled_when_read(verdict, data):
    anchors, rollouts, size = verdict.arguments
    lists = [data.draw(CHOSEN | st.lists(st.sampled_from(ids), max_size=size + 1)) for ids in (anchors, rollouts)]
    value = dict(zip(("keep_anchor_ids", "add_rollout_ids"), lists, strict=True))
    keep, add = lists
    known = all(i in anchors for i in keep) and all(i in rollouts for i in add)
    bounded = known and all(len(chosen) <= size for chosen in lists)
    chosen = keep + add
    answer = json.dumps(value)
    assert bool(re.fullmatch(verdict.constraint["regex"], answer)) == bounded
    assert fits(value, verdict.schema) == bounded
    if bounded:
        assert len(answer.encode()) <= len(verdict.longest.encode())
    if known and len(chosen) == size and all(chosen.count(i) == 1 for i in chosen):
        assert verdict.parse(answer) == tuple(chosen)
        assert bounded
    else:
        with pytest.raises(VerdictError):
            verdict.parse(answer)


@pytest.mark.parametrize("verdict", [SELECTIONS[0], SELECTIONS[2]], ids=str)
def test_every_valid_selection_can_be_decoded_and_is_read(verdict):
    valid = valid_answers(verdict)
    for answer in valid:
        assert re.fullmatch(verdict.constraint["regex"], answer)
        assert fits(json.loads(answer), verdict.schema)
        assert len(answer) <= len(verdict.longest)
        value = json.loads(answer)
        assert verdict.parse(answer) == (*value["keep_anchor_ids"], *value["add_rollout_ids"])
        assert verdict.parse(json.dumps(value, indent=2)) == verdict.parse(answer)


@given(st.data(), st.sampled_from(SELECTIONS))
def test_what_the_regex_of_a_selection_admits_has_one_layout(data, verdict):
    assert list(verdict.constraint) == ["regex"]
    assert re.fullmatch(verdict.constraint["regex"], verdict.longest)
    text = data.draw(edited(verdict.longest))
    if re.fullmatch(verdict.constraint["regex"], text):
        assert json.dumps(json.loads(text)) == text
        assert len(text) <= len(verdict.longest)


@pytest.mark.parametrize("verdict", SELECTIONS, ids=str)
def test_no_selection_that_the_regex_admits_is_longer_than_the_longest(verdict):
    assert re.fullmatch(verdict.constraint["regex"], verdict.longest)
    anchors, rollouts, size = verdict.arguments
    for keep, add in product(anchors, rollouts):
        answer = json.dumps({"keep_anchor_ids": [keep] * size, "add_rollout_ids": [add] * size})
        assert re.fullmatch(verdict.constraint["regex"], answer)
        assert len(answer) <= len(verdict.longest)


@pytest.mark.parametrize(
    "value",
    ["null", "4", '"A0"', '{"A0": 1}', '[["A0"]]', "[null]", "[true]", "[0]"],
)
def test_a_selection_is_made_of_lists_of_ids(value):
    for answer in (
        f'{{"keep_anchor_ids": {value}, "add_rollout_ids": ["R0", "R1", "R2"]}}',
        f'{{"keep_anchor_ids": ["A0", "A1"], "add_rollout_ids": {value}}}',
        '{"keep_anchor_ids": ["A0", "A1"]}',
        '{"add_rollout_ids": ["R0", "R1", "R2"]}',
    ):
        with pytest.raises(VerdictError):
            SELECTIONS[2].parse(answer)


# Orders


@given(IDS)
def test_the_grammar_of_an_order_derives_each_permutation_once_and_nothing_else(ids):
    constraint = Order(ids).constraint
    assert list(constraint) == ["grammar"]
    derived = language(read_grammar(constraint["grammar"]))
    assert sorted(derived) == sorted(json.dumps({"order": order}) for order in permutations(ids))
    assert [Order(ids).parse(answer) for answer in derived] == [json.loads(answer)["order"] for answer in derived]


@pytest.mark.parametrize("n", range(1, GRAMMAR_LIMIT + 1))
def test_a_grammar_has_one_rule_for_each_set_of_ids_left(n):
    text = Order(tuple(range(90, 90 + n))).constraint["grammar"]
    rules = read_grammar(text)
    left = {frozenset(re.findall(r"\d+", name)) for name in rules if name != "root"}
    assert len(rules) == 2**n and len(left) == 2**n - 1
    assert size(rules) == math.factorial(n)
    assert len(text) < 9 * n * 2**n + 40, "it grows with the sets, not with the permutations, and names are short"


@every_verdict
def test_a_constraint_is_one_that_servers_take(verdict):
    ((kind, text),) = verdict.constraint.items()
    assert kind in ("regex", "grammar")
    assert text.isascii()


MANY = st.lists(st.integers(0, 99), min_size=GRAMMAR_LIMIT + 1, max_size=GRAMMAR_LIMIT + 6, unique=True)


@given(st.data(), MANY)
def test_of_a_long_order_number_and_range_are_imposed_and_doubles_are_caught_when_read(data, ids):
    verdict = Order(tuple(ids))
    assert list(verdict.constraint) == ["regex"]
    drawn = data.draw(st.lists(st.sampled_from(ids), min_size=len(ids) - 1, max_size=len(ids) + 1))
    foreign = data.draw(st.integers(0, 120))
    for order in (data.draw(st.permutations(ids)), drawn, [foreign, *drawn[1:]], [*drawn[:-1], foreign]):
        answer = json.dumps({"order": order})
        imposed = bool(re.fullmatch(verdict.constraint["regex"], answer))
        assert imposed == (len(order) == len(ids) and set(order) <= set(ids))
        if sorted(order) == sorted(ids):
            assert verdict.parse(answer) == order
        else:
            with pytest.raises(VerdictError):
                verdict.parse(answer)


def test_a_long_order_has_one_layout():
    answer, regex = Order(LONG).longest, Order(LONG).constraint["regex"]
    assert re.fullmatch(regex, answer)
    for at in range(len(answer) + 1):
        for text in (
            answer[:at] + answer[at + 1 :],
            answer[:at] + " " + answer[at:],
            answer[:at] + "\n" + answer[at:],
        ):
            if text != answer and re.fullmatch(regex, text):
                order = json.loads(text)["order"]
                assert text == json.dumps({"order": order}) and len(order) == len(LONG) and set(order) <= set(LONG)


# Placements: an order, and positions along it


@given(PLACEMENTS)
def test_a_verdict_stands_for_each_merged_order_once_and_back(verdict):
    n, K = verdict.arguments
    orders = merged_orders(n, K)
    assert len(orders) == math.factorial(n + K) // math.factorial(K)
    answers = [json.dumps(placed(merged)) for merged in orders]
    assert len(set(answers)) == len(orders)
    for answer, merged in zip(answers, orders, strict=True):
        order, positions = verdict.parse(answer)
        assert json.dumps({"order": order, "positions": positions}) == answer
        assert merge(order, positions, K) == merged


@given(PLACEMENTS)
def test_the_grammar_of_a_placement_derives_each_valid_answer_once_and_nothing_else(verdict):
    assert list(verdict.constraint) == ["grammar"]
    derived = language(read_grammar(verdict.constraint["grammar"]))
    assert len(derived) == len(set(derived))
    assert set(derived) == valid_answers(verdict)


@pytest.mark.parametrize("K", [2, 6, 12])
@pytest.mark.parametrize("n", range(1, GRAMMAR_LIMIT + 1))
def test_a_grammar_of_a_placement_has_a_rule_for_each_set_left_and_for_each_position(n, K):
    text = Placement(n, K).constraint["grammar"]
    rules = read_grammar(text)
    assert len(rules) == 2**n + n * (K + 1)
    assert size(rules) == math.factorial(n) * math.comb(n + K, K)
    assert placement_verdict(n, K).constraint["grammar"] is text, "a text is built once"


@given(st.data(), st.integers(GRAMMAR_LIMIT + 1, GRAMMAR_LIMIT + 3), st.integers(2, 12))
def test_of_a_long_placement_numbers_and_ranges_are_imposed(data, n, K):
    verdict = Placement(n, K)
    assert list(verdict.constraint) == ["regex"]
    order = data.draw(st.permutations(range(n)) | st.lists(st.integers(0, n), min_size=n - 1, max_size=n + 1))
    positions = data.draw(st.lists(st.integers(0, K + 1), min_size=n - 1, max_size=n + 1))
    value = {"order": order, "positions": data.draw(st.sampled_from([positions, sorted(positions)]))}
    answer = json.dumps(value)
    imposed = len(order) == len(positions) == n and max(order) < n and max(positions) <= K
    assert bool(re.fullmatch(verdict.constraint["regex"], answer)) == imposed == fits(value, verdict.schema)
    if imposed and len(set(order)) == n and value["positions"] == sorted(positions):
        assert verdict.parse(answer) == (order, value["positions"])
    else:
        with pytest.raises(VerdictError):
            verdict.parse(answer)


@given(st.data(), PLACEMENTS)
def test_the_schema_of_a_placement_admits_what_is_read_and_else_only_doubles_and_falls(data, verdict):
    n, K = verdict.arguments
    some = st.lists(st.integers(-1, max(n, K) + 1) | st.sampled_from([True, 1.0, "1", None]), max_size=n + 1) | VALUES
    value = {"order": data.draw(some), "positions": data.draw(some)}
    value = data.draw(st.sampled_from([value, json.loads(data.draw(st.sampled_from(sorted(valid_answers(verdict)))))]))
    valid = json.dumps(value) in valid_answers(verdict)
    assert fits(value, verdict.schema) or not valid
    if valid:
        assert verdict.parse(json.dumps(value, indent=1)) == (value["order"], value["positions"])
    else:
        with pytest.raises(VerdictError):
            verdict.parse(json.dumps(value))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"order": [2, 0], "positions": [0, 1, 2]}', r"each of \[0, 1, 2\] exactly once, not \[2, 0\]"),
        ('{"order": [2, 0, 0], "positions": [0, 1, 2]}', "exactly once"),
        ('{"order": [2, 0, 1], "positions": [0, 1]}', "must hold 3 integers, one for each of `order`, not 2"),
        ('{"order": [2, 0, 1], "positions": [0, 2, 1]}', r"must never decrease along `order`, not \[0, 2, 1\]"),
        ('{"order": [2, 0, 1], "positions": [0, 1, 7]}', r"integers from 0 to 6, not \[0, 1, 7\]"),
        ('{"order": [2, 0, 1], "positions": [-1, 0, 1]}', "integers from 0 to 6"),
        ('{"order": [2, 0, 1], "positions": [0, true, 2]}', "integers from 0 to 6"),
        ('{"order": [2, 0, 1], "positions": 3}', "list of integers from 0 to 6, not 3"),
        ('{"order": [2, 0, 1], "positions": {"2": 0}}', "must have the key `order` exactly once"),
        ('{"order": [2, 0, 1]}', "must have the key `positions` exactly once"),
        ('{"positions": [0, 1, 2]}', "must have the key `order` exactly once"),
        ('{"order": [2, 0, 1], "positions": [0, 0, 0], "positions": [1, 1, 1]}', "`positions` exactly once"),
        ('{"order": ["R2", "R0", "R1"], "positions": [0, 1, 2]}', "`order` must be a list of integers"),
        ('{"order": [<candidate IDs>], "positions": [<integers from 0 through 6>]}', "not valid JSON"),
        ("2 < 0 < 1", "exactly one flat JSON object"),
    ],
)
def test_a_fault_of_a_placement_is_named(answer, message):
    with pytest.raises(VerdictError, match=message) as caught:
        placement_verdict(3, 6).parse(answer)
    assert len(str(caught.value)) < 400


# All


@pytest.mark.parametrize("verdict", SHORT, ids=str)
def test_whatever_a_constraint_admits_is_read(verdict):
    for answer in valid_answers(verdict):
        assert json.dumps({type(verdict).__name__.lower(): verdict.parse(answer)}) == answer


@given(st.data(), st.sampled_from(SHORT))
def test_the_schema_admits_what_is_read_and_else_only_doubled_ids(data, verdict):
    value = data.draw(st.sampled_from(sorted(valid_answers(verdict))).map(json.loads) | OBJECTS)
    try:
        verdict.parse(json.dumps(value))
        valid = len(value) == 1
    except VerdictError:
        valid = False
    doubled = (
        isinstance(verdict, Order)
        and fits(value, verdict.schema)
        and len(set(value["order"])) < len(verdict.arguments[0])
    )
    assert fits(value, verdict.schema) == (valid or doubled)


@pytest.mark.parametrize("K", [2, 9, 12])
def test_the_schema_of_a_position_bounds_its_range(K):
    assert [n for n in range(-20, 40) if fits({"position": n}, Position(K).schema)] == list(range(K + 1))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_the_schema_of_an_order_bounds_number_and_range(order):
    verdict = Order((3, 1, 4))
    assert fits({"order": order}, verdict.schema) == (len(order) == 3 and set(order) <= {1, 3, 4})


@every_verdict
def test_a_schema_is_closed(verdict):
    good = json.loads(verdict.longest)
    assert fits(good, verdict.schema)
    assert not fits(good | {"why": 1}, verdict.schema)
    assert not fits({}, verdict.schema)
    assert json.loads(json.dumps(verdict.schema)) == verdict.schema


@given(st.integers(2, 120).map(Position) | IDS.map(Order) | PLACEMENTS | st.sampled_from(SCORED))
def test_the_longest_answer_is_valid_and_none_is_longer(verdict):
    valid = valid_answers(verdict)
    assert verdict.longest in valid
    assert len(verdict.longest.encode()) == max(len(answer.encode()) for answer in valid)


@pytest.mark.parametrize("decoding", DECODINGS)
@given(st.integers(2, 120).map(Position) | IDS.map(Order) | PLACEMENTS | st.sampled_from(SCORED), st.integers(0, 500))
def test_the_token_limit_cuts_no_valid_answer_off(decoding, verdict, free_tokens):
    limit = constrain(verdict, decoding, free_tokens)["max_tokens"]
    most = max(len(answer.encode()) for answer in valid_answers(verdict)) + 1  # a token a byte, and one for the end
    assert limit == max_tokens(verdict, decoding, free_tokens) >= most
    assert limit == most + (0 if decoding == "regex" else free_tokens)


@every_verdict
def test_each_decoding_sends_its_own_form(verdict):
    regex, schema, none = (constrain(verdict, decoding, 7) for decoding in ("regex", "json_schema", "none"))
    assert set(DECODINGS) == {"regex", "json_schema", "none"}
    assert list(none) == ["max_tokens"]
    assert regex.keys() - none == {"structured_outputs"} and regex["structured_outputs"] == verdict.constraint
    assert schema.keys() - none == {"response_format"}
    assert schema["response_format"]["type"] == "json_schema"
    assert schema["response_format"]["json_schema"]["schema"] == verdict.schema
    assert schema["response_format"]["json_schema"]["strict"] is True


def test_verdicts_are_equal_if_they_expect_the_same():
    assert position_verdict(4) == position_verdict(4) != position_verdict(5)
    assert order_verdict((1, 2)) == order_verdict([1, 2]) != order_verdict((2, 1))
    assert placement_verdict(2, 3) == placement_verdict(2, 3) != placement_verdict(3, 2)
    assert winner_verdict(("A", "B")) != winner_verdict(("A", "B", "tie"))
