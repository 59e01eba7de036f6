"""Verdicts imposed on a server: each form admits the valid answers and no other, shown against slow oracles.

How answers are read is tested in `test_questions.py`.
"""

import json
import math
import re
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.judge import Order, Position, Verdict, VerdictError
from rankbuffer_trl.judge.openai_client import DECODINGS, constrain
from rankbuffer_trl.judge.verdicts import GRAMMAR_LIMIT

IDS = st.lists(st.integers(0, 120), min_size=1, max_size=5, unique=True).map(tuple)
LONG = tuple(range(3, 3 + 2 * (GRAMMAR_LIMIT + 1), 2))
VERDICTS = (
    Position(2),
    Position(9),
    Position(12),
    Order((4,)),
    Order((4, 0, 11)),
    Order((7, 100, 1, 10)),
    Order(LONG),
)
SHORT = VERDICTS[:-1]
every_verdict = pytest.mark.parametrize("verdict", VERDICTS, ids=str)


# Oracles


def valid_answers(verdict: Verdict) -> set[str]:
    """All of them, written out."""
    if isinstance(verdict, Position):
        return {json.dumps({"position": p}) for p in range(verdict.K + 1)}
    return {json.dumps({"order": order}) for order in permutations(verdict.ids)}


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
    types = {"object": dict, "array": list, "integer": int}
    if type(value) is not types[schema["type"]]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
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
        answer = answer[:at] + draw(st.text('{}[]":, \n0123456789-.positonrde', max_size=2)) + answer[at + cut :]
    return answer


NUMBERS = st.integers(-2, 125)
VALUES = NUMBERS | st.lists(NUMBERS, max_size=6) | st.sampled_from([None, True, False, "1", 1.0, [[1]], {}])
OBJECTS = st.dictionaries(st.sampled_from(["position", "order", "Position", "why"]), VALUES, max_size=2)


def nearly(verdict: Verdict) -> st.SearchStrategy[str]:
    """Texts in the neighbourhood of valid answers."""
    some = [verdict.longest, *sorted(valid_answers(verdict))[:40]]
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
    assert len(text) < 40 * n * 2**n, "it grows with the sets, not with the permutations"


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


# Both


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
        isinstance(verdict, Order) and fits(value, verdict.schema) and len(set(value["order"])) < len(verdict.ids)
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


@given(st.integers(2, 120).map(Position) | IDS.map(Order))
def test_the_longest_answer_is_valid_and_none_is_longer(verdict):
    valid = valid_answers(verdict)
    assert verdict.longest in valid
    assert len(verdict.longest.encode()) == max(len(answer.encode()) for answer in valid)


@pytest.mark.parametrize("decoding", DECODINGS)
@given(st.integers(2, 120).map(Position) | IDS.map(Order), st.integers(0, 500))
def test_the_token_limit_cuts_no_valid_answer_off(decoding, verdict, free_tokens):
    limit = constrain(verdict, decoding, free_tokens)["max_tokens"]
    most = max(len(answer.encode()) for answer in valid_answers(verdict)) + 1  # a token a byte, and one for the end
    assert limit >= most
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
