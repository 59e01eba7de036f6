"""How answers are read: a verdict is found through what stands around it, and anything else is an error."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import VerdictError, insertion_question, ranking_question

QUERY = Query("tea", [{"role": "user", "content": "How do I make tea?"}], (Rubric("Says how long to wait.", 5),))
CANDIDATES = tuple(Rollout(id, "text") for id in (4, 0, 11))


def coarse():
    return insertion_question(QUERY, ("no", "hot water", "Boil water."), "Wait three minutes.")


def order_only():
    return insertion_question(QUERY, ("no", "hot water", "Boil water."), "Wait three minutes.", anchor_content=False)


# Good answers.

AROUND = {
    "plain": "%s",
    "white space": "\n  %s \n",
    "code fence": "```json\n%s\n```",
    "sentence before": "Here is my verdict: %s",
    "sentence after": "%s\n\nThe candidate beats two anchors [A0] and [A1].",
    "thinking before": "<think>Better than A0. Worse?</think>\n\n%s",
    "thinking with a draft": '<think>Maybe {"position": 1} or {"order": [1]}, or {{}}.</think>%s',
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_a_good_answer_is_read_through_what_stands_around_it(around):
    assert coarse().verdict.parse(around.replace("%s", '{"position": 2}')) == 2
    assert order_only().verdict.parse(around.replace("%s", '{"position": 2}')) == 2
    assert ranking_question(QUERY, CANDIDATES).verdict.parse(around.replace("%s", '{"order": [11, 0, 4]}')) == [
        11,
        0,
        4,
    ]


@pytest.mark.parametrize("answer", ['{"position":2}', '{\n  "position" :\t2\n}', '{"why": "better", "position": 2}'])
def test_layout_and_other_keys_do_not_matter(answer):
    assert coarse().verdict.parse(answer) == 2


@given(st.integers(2, 12).flatmap(lambda K: st.tuples(st.just(K), st.integers(0, K))), st.booleans())
def test_every_position_round_trips(case, anchor_content):
    K, position = case
    question = insertion_question(QUERY, ["anchor"] * K, "candidate", anchor_content)
    verdict = question.verdict.parse(json.dumps({"position": position}))
    assert verdict == position
    assert type(verdict) is int


@given(st.lists(st.integers(0, 99), min_size=2, max_size=12, unique=True).flatmap(st.permutations), st.randoms())
def test_every_permutation_round_trips(ids, random):
    question = ranking_question(QUERY, [Rollout(i, "text") for i in ids])
    order = random.sample(ids, len(ids))
    assert question.verdict.parse(json.dumps({"order": order})) == order


# Bad answers.

BAD = {
    "empty": "",
    "white space": " \n ",
    "prose": "The candidate is better than two anchors, so position 2 and order 4, 0, 11.",
    "bare value": "2",
    "bare list": "[4, 0, 11]",
    "no value": "{}",
    "braces of prose": "{the best one}",
    "single quotes": "{'position': 2, 'order': [4, 0, 11]}",
    "two objects": '{"position": 2, "order": [4, 0, 11]} {"position": 2, "order": [4, 0, 11]}',
    "two objects that differ": '{"position": 2, "order": [4, 0, 11]}\n{"position": 1, "order": [0, 4, 11]}',
    "nested object": '{"verdict": {"position": 2, "order": [4, 0, 11]}, "sure": {}}',
    "duplicate key": '{"position": 2, "order": [4, 0, 11], "position": 2, "order": [4, 0, 11]}',
    "missing key": '{"place": 2, "ranking": [4, 0, 11]}',
    "wrong case": '{"Position": 2, "Order": [4, 0, 11]}',
    "object": '{"position": {"p": 2, "q": 1}, "order": {"p": [4], "q": {}}}',
    "true": '{"position": true, "order": true}',
    "null": '{"position": null, "order": null}',
    "infinity": '{"position": Infinity, "order": [Infinity, 0, 11]}',
    "nan": '{"position": NaN, "order": [NaN, 0, 11]}',
    "truncated": '{"position": 2, "order": [4, 0, 11]',
    "truncated at the key": '{"posit',
    "truncated thinking": "<think>position 2 or order 4, 0, 11",
    "answer before the thinking's end": '{"position": 2, "order": [4, 0, 11]}</think>',
    "trailing comma": '{"position": 2, "order": [4, 0, 11],}',
    "template repeated": '{"position": <integer from 0 through 3>, "order": <permutation>}',
    "huge prose": "word " * 200_000,
    "huge braces": "{" * 500_000,
    "huge closed braces": "{}" * 200_000,
    "huge number": '{"position": 1' + "0" * 10_000 + ', "order": [1' + "0" * 10_000 + "]}",
    "huge list": '{"position": [0' + ", 0" * 200_000 + '], "order": [4, 0, 11' + ", 0" * 200_000 + "]}",
    "white space for ever": '{"position": ' + " " * 500_000,
    "deep list": '{"position": ' + "[" * 100_000 + "]" * 100_000 + ', "order": ' + "[" * 100_000 + "]" * 100_000 + "}",
}
BAD_POSITIONS = ['"3"', '"2"', "2.0", "3.0", "2.5", "false", "-1", "4", "1e0", "02", "+2", "[2]", "10000000000", '""']
BAD_ORDERS = {
    "repeated id": "[4, 0, 0]",
    "repeated and complete": "[4, 0, 11, 11]",
    "missing id": "[4, 0]",
    "extra id": "[4, 0, 11, 12]",
    "foreign id": "[4, 0, 12]",
    "places instead of ids": "[0, 1, 2]",
    "empty": "[]",
    "nested": "[[4, 0, 11]]",
    "partly nested": "[4, [0], 11]",
    "strings": '["4", "0", "11"]',
    "names": '["R4", "R0", "R11"]',
    "floats": "[4.0, 0.0, 11.0]",
    "boolean for zero": "[4, false, 11]",
    "with null": "[4, 0, 11, null]",
    "a string": '"4, 0, 11"',
    "a number": "4",
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD.keys())
def test_a_bad_answer_is_refused(answer):
    for question in (coarse(), order_only(), ranking_question(QUERY, CANDIDATES)):
        with pytest.raises(VerdictError) as caught:
            question.verdict.parse(answer)
        assert 0 < len(str(caught.value)) < 400, "the fault is named in a length that can be put to the judge"


@pytest.mark.parametrize("before", ["<think>", "<think>Is it 1?</think> <think>No, ", "</think><think>\n"])
def test_an_object_inside_an_open_thinking_block_is_no_verdict(before):
    with pytest.raises(VerdictError, match="the answer ends inside its thinking block"):
        coarse().verdict.parse(before + '{"position": 2}')
    assert coarse().verdict.parse(before + '{"position": 1}</think>\n{"position": 2}') == 2


@pytest.mark.parametrize("value", BAD_POSITIONS)
def test_a_position_is_an_integer_from_0_to_K(value):
    for question in (coarse(), order_only()):
        with pytest.raises(VerdictError):
            question.verdict.parse(f'{{"position": {value}}}')


@pytest.mark.parametrize("value", BAD_ORDERS.values(), ids=BAD_ORDERS.keys())
def test_an_order_holds_each_id_exactly_once(value):
    with pytest.raises(VerdictError):
        ranking_question(QUERY, CANDIDATES).verdict.parse(f'{{"order": {value}}}')


@pytest.mark.parametrize("ids", [(1, 0), (0, 10)])
def test_zero_and_one_are_not_false_and_true(ids):
    question = ranking_question(QUERY, [Rollout(i, "text") for i in ids])
    with pytest.raises(VerdictError):
        question.verdict.parse(json.dumps({"order": [bool(i) if i in (0, 1) else i for i in ids]}))


def test_verdict_errors_name_the_fault():
    with pytest.raises(VerdictError, match="integer from 0 through 3, not 7"):
        coarse().verdict.parse('{"position": 7}')
    with pytest.raises(VerdictError, match=r"each of \[4, 0, 11\] exactly once, not \[4, 0\]"):
        ranking_question(QUERY, CANDIDATES).verdict.parse('{"order": [4, 0]}')


JSON_LIKE = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", '"position"', '"order"', ":", ",", "0", "-1", "4", "11", "true", "</think>", " "]
    )
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.fixed_dictionaries({"position": VALUES, "order": VALUES}).map(json.dumps)


@settings(max_examples=400)
@given(st.text() | JSON_LIKE | OBJECTS)
@example('{"position": "\ud800"}')
@example("{\x00}")
def test_any_text_gives_a_valid_verdict_or_a_verdict_error(answer):
    try:
        position = coarse().verdict.parse(answer)
    except VerdictError:
        pass
    else:
        assert type(position) is int
        assert 0 <= position <= 3
    try:
        order = ranking_question(QUERY, CANDIDATES).verdict.parse(answer)
    except VerdictError:
        pass
    else:
        assert sorted(order) == [0, 4, 11]
        assert all(type(i) is int for i in order)
