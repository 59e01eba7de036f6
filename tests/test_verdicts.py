"""Verdicts: a form that is imposed admits the valid answers and no other, and every answer is read strictly."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice, permutations, product
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rankbuffer_trl.judge import VerdictError
from rankbuffer_trl.judge._verdicts import (
    DECODINGS,
    GRAMMAR_LIMIT,
    Verdict,
    constrain,
    max_tokens,
    order_verdict,
    position_verdict,
    score_verdict,
    scores_verdict,
    selection_verdict,
    winner_verdict,
)

MOST = 3000  # answers that are written out; only the long forms have more


# The oracle: for each form, which values are valid, and which of them a schema or regular expression can tell.


class Form(NamedTuple):
    """A verdict, and what must be true of it. Both predicates take the values of its keys."""

    verdict: Verdict
    valid: Callable[..., bool]
    imposed: Callable[..., bool]
    answers: list[dict]


def is_list_of(value: object, length: int, items: Sequence) -> bool:
    return isinstance(value, list) and len(value) == length and all(is_one_of(each, items) for each in value)


def is_one_of(value: object, items: Sequence) -> bool:
    return any(type(value) is type(item) and value == item for item in items)


def alone(verdict: Verdict, values: Iterable) -> Form:
    """A form with one value out of a few, which can all be imposed."""
    (key,), values = verdict.properties, list(values)

    def valid(value: object) -> bool:
        return is_one_of(value, values)

    return Form(verdict, valid, valid, [{key: value} for value in values])


def position(K: int) -> Form:
    return alone(position_verdict(K), range(K + 1))


def scores(n: int = 2, most: int = 10) -> Form:
    def valid(scores: object) -> bool:
        return is_list_of(scores, n, range(most + 1))

    answers = [{"scores": list(each)} for each in product(range(most + 1), repeat=n)]
    return Form(scores_verdict(n, most), valid, valid, answers)


def order(*ids: int) -> Form:
    def imposed(order: object) -> bool:
        return is_list_of(order, len(ids), ids)

    def valid(order: object) -> bool:
        return imposed(order) and len(set(order)) == len(ids)

    answers = [{"order": list(each)} for each in islice(permutations(ids), MOST)]
    return Form(order_verdict(ids), valid, imposed, answers)


def selection(anchors: int, rollouts: int, size: int) -> Form:
    A, R = tuple(f"A{i}" for i in range(anchors)), tuple(f"R{i}" for i in range(rollouts))

    def imposed(*lists: object) -> bool:
        return all(
            isinstance(ids, list) and len(ids) <= size and is_list_of(ids, len(ids), known)
            for ids, known in zip(lists, (A, R), strict=True)
        )

    def valid(keep: object, add: object) -> bool:
        return imposed(keep, add) and len({*keep, *add}) == len(keep + add) == size

    answers = (
        {"keep_anchor_ids": list(keep), "add_rollout_ids": list(add)}
        for kept in range(size + 1)
        for keep in permutations(A, kept)
        for add in permutations(R, size - kept)
    )
    return Form(selection_verdict(A, R, size), valid, imposed, list(islice(answers, MOST)))


FORMS = {
    "position among 2": position(2),
    "position among 9": position(9),
    "position among 12": position(12),
    "order of one": order(4),
    "order of three": order(4, 0, 11),
    "order of four": order(7, 100, 1, 10),
    "order of eleven": order(*range(3, 3 + 2 * (GRAMMAR_LIMIT + 1), 2)),
    "score": alone(score_verdict(), range(11)),
    "scores": scores(),
    "scores of a group": scores(3, 4),
    "winner": alone(winner_verdict(("A", "B", "tie")), ("A", "B", "tie")),
    "winner without tie": alone(winner_verdict(("A", "B")), ("A", "B")),
    "selection of four": selection(4, 2, 4),
    "selection of three": selection(2, 3, 3),
    "selection with ids of two lengths": selection(4, 12, 4),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def meant(value: dict) -> object:
    """The verdict that a valid value stands for."""
    match value:
        case {"order": order, "positions": positions}:
            return order, positions
        case {"scores": scores}:
            return tuple(scores)
        case {"keep_anchor_ids": keep, "add_rollout_ids": add}:
            return (*keep, *add)
    (verdict,) = value.values()
    return verdict


def fits(value: object, schema: dict) -> bool:
    """Whether `value` satisfies a JSON schema made of the keywords below."""
    known = {"type", "properties", "required", "additionalProperties", "enum", "items", "minItems", "maxItems"}
    assert set(schema) <= known, "this little validator must know every keyword"
    types = {"object": dict, "array": list, "integer": int, "string": str}
    if type(value) is not types[schema["type"]]:
        return False
    if isinstance(value, list):
        enough = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return enough and all(fits(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        assert schema["additionalProperties"] is False
        properties = schema["properties"]
        closed = set(schema["required"]) <= set(value) <= set(properties)
        return closed and all(fits(value[key], properties[key]) for key in value)
    return value in schema["enum"]


def read_grammar(text: str) -> dict[str, list[list[str]]]:
    """Rules of an EBNF by name: alternatives of tokens, each `"a literal"` or the name of a rule."""
    rules = {}
    for line in text.splitlines():
        name, body = line.split(" ::= ")
        assert name not in rules, "a rule is defined once"
        alternatives = [re.findall(r'"(?:[^"\\]|\\.)*"|\w+', each) for each in body.split(" | ")]
        assert " | ".join(" ".join(tokens) for tokens in alternatives) == body
        rules[name] = alternatives
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


def derivations(rules: dict[str, list[list[str]]]) -> int:
    """How many derivations the root has, without writing them out."""

    @cache
    def ways(token: str) -> int:
        return 1 if token.startswith('"') else sum(math.prod(map(ways, tokens)) for tokens in rules[token])

    return ways("root")


# What is imposed.


@every_form
def test_verdict_constraint_admits_every_valid_answer_in_one_layout(form):
    ((kind, text),) = form.verdict.constraint.items()
    assert text.isascii()
    answers = list(map(json.dumps, form.answers))
    if kind == "grammar":
        assert sorted(language(read_grammar(text))) == sorted(answers), "each is derived once"
        return
    assert kind == "regex" and all(re.fullmatch(text, answer) for answer in answers)
    for answer in (form.verdict.longest, answers[0]):
        for near in edited(answer):
            if re.fullmatch(text, near):
                value = json.loads(near)
                assert json.dumps(value) == near and form.imposed(*value.values()), near


def edited(answer: str) -> Iterable[str]:
    """Every text that is one character away."""
    for at in range(len(answer) + 1):
        yield answer[:at] + answer[at + 1 :]
        for character in ' \n01239-+.,:"{}[]eARB':
            yield answer[:at] + character + answer[at:]
            yield answer[:at] + character + answer[at + 1 :]


def test_grammars_grow_with_the_sets_of_ids_left():
    for n in range(1, GRAMMAR_LIMIT + 1):
        text = order_verdict(tuple(range(90, 90 + n))).constraint["grammar"]
        rules = read_grammar(text)
        assert (len(rules), derivations(rules)) == (2**n, math.factorial(n))
        assert len(text) < 9 * n * 2**n + 40, "names are short"
        assert order_verdict(tuple(range(90, 90 + n))).constraint["grammar"] is text, "a text is built once"


def test_a_grammar_is_made_when_a_server_imposes_it(monkeypatch):
    monkeypatch.setattr("rankbuffer_trl.judge._verdicts.permutation_grammar", made := Mock(return_value="root"))
    verdict = order_verdict((70, 71))
    assert verdict == order_verdict((70, 71)) and verdict.parse('{"order": [71, 70]}') == [71, 70]
    assert "structured_outputs" not in constrain(verdict, "none", 0) | constrain(verdict, "json_schema", 0)
    assert not made.called
    assert constrain(verdict, "regex", 0)["structured_outputs"] == {"grammar": "root"}


ITEM = st.integers(-1, 13) | st.sampled_from(
    [True, False, 1.0, "1", None, [], {}, [1], "", "A", "B", "C", "a", "tie", "A0", "R1", "R10", "L0", 100, 10**30]
    + [math.nan, math.inf, {"p": 1}]
)


@st.composite
def nearly(draw, form: Form) -> dict:
    """A valid value with up to three changes, most of which make it wrong."""
    value = deepcopy(draw(st.sampled_from(form.answers)))
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(list(value)))
        part = value[key]
        if isinstance(part, list) and draw(st.booleans()):
            at = draw(st.integers(0, len(part)))
            part[at : at + draw(st.integers(0, 1))] = draw(st.lists(ITEM | st.sampled_from([*part, 0]), max_size=2))
        else:
            value[key] = deepcopy(draw(ITEM | st.lists(ITEM, max_size=4)))
    return value


@every_form
@settings(max_examples=150)
@given(st.data())
def test_verdict_is_read_where_valid_and_imposed_where_it_can_be(form, data):
    value = data.draw(nearly(form))
    answer, values = json.dumps(value), list(value.values())
    assert fits(value, form.verdict.schema) == form.imposed(*values)
    if "regex" in form.verdict.constraint:
        assert bool(re.fullmatch(form.verdict.constraint["regex"], answer)) == form.imposed(*values)
    if form.valid(*values):
        assert len(answer) <= len(form.verdict.longest)
        assert form.verdict.parse(answer) == form.verdict.parse(json.dumps(value, indent=1)) == meant(value)
        return
    with pytest.raises(VerdictError) as caught:
        form.verdict.parse(answer)
    assert 0 < len(str(caught.value)) < 400, "the fault is named in a length that can be put to the judge"


@every_form
def test_verdict_schema_is_closed_and_every_valid_answer_fits_and_is_read(form):
    for value in form.answers:
        assert fits(value, form.verdict.schema) and form.verdict.parse(json.dumps(value)) == meant(value)
        assert not fits(value | {"why": 1}, form.verdict.schema)
        for key in value:
            assert not fits({other: value[other] for other in value if other != key}, form.verdict.schema)
    assert json.loads(json.dumps(form.verdict.schema)) == form.verdict.schema


@every_form
def test_verdict_token_limit_cuts_no_answer_off_and_each_decoding_sends_its_form(form):
    verdict = form.verdict
    assert form.imposed(*json.loads(verdict.longest).values())
    assert len(verdict.longest) >= max(len(json.dumps(value)) for value in form.answers)
    most = len(verdict.longest) + 1  # a token a byte, and one for the end
    assert DECODINGS == ("regex", "json_schema", "none")
    for decoding, free in product(DECODINGS, (0, 7, 500)):
        assert max_tokens(verdict, decoding, free) == most + (0 if decoding == "regex" else free)
    schema = {"name": "verdict", "strict": True, "schema": verdict.schema}
    assert constrain(verdict, "regex", 7) == {"max_tokens": most, "structured_outputs": verdict.constraint}
    assert constrain(verdict, "none", 7) == {"max_tokens": most + 7}
    assert constrain(verdict, "json_schema", 7) == {
        "max_tokens": most + 7, "response_format": {"type": "json_schema", "json_schema": schema},
    }  # fmt: skip


def test_verdict_longest_is_made_of_the_longest_ids():
    def lengths(verdict: Verdict) -> list[list[int]]:
        return [[len(str(each)) for each in ids] for ids in json.loads(verdict.longest).values()]

    assert lengths(FORMS["selection with ids of two lengths"].verdict) == [[2] * 4, [3] * 4]
    assert FORMS["winner"].verdict.longest == '{"winner": "tie"}'


def test_verdicts_are_equal_if_they_expect_the_same():
    assert position_verdict(4) == position_verdict(4) != position_verdict(5)
    assert order_verdict((1, 2)) == order_verdict([1, 2]) != order_verdict((2, 1))
    assert winner_verdict(("A", "B")) != winner_verdict(("A", "B", "tie"))


# What is read.

AROUND = {
    "white space": "\n  %s \n",
    "code fence": "```json\n%s\n```",
    "sentence before": "Here is my verdict: %s",
    "sentence after": "%s\n\nThe candidate beats two anchors [A0] and [A1].",
    "a brace after": "%s}",
    "thinking before": "<think>Better than A0. Worse?</think>\n\n%s",
    "thinking with a draft": '<think>Maybe {"position": 1} or {"order": [1]}, or {{}}.</think>%s',
    "thinking twice": "<think>Is it 1?</think> <think>No, {}</think>%s",
    "thinking that was opened by the prompt": 'So {"position": 1}.</think><think>\n</think>%s',
}


def test_verdict_parse_reads_an_answer_through_what_stands_around_it():
    for name, around in AROUND.items():
        for form in FORMS.values():
            value = form.answers[-1]
            for text in (json.dumps(value, separators=(",", ":")), json.dumps({"why": "better"} | value, indent=2)):
                assert form.verdict.parse(around.replace("%s", text)) == meant(value), name


ONE, SOME, CHOICE = position_verdict(3), order_verdict((4, 0, 11)), selection_verdict(("A0", "A1"), ("R0",), 2)
FAULTS = (  # verdict, answer, part of the message
    (ONE, "", "exactly one flat JSON object, it holds 0"),
    *((ONE, answer, "it holds 0") for answer in ("[2]", "The candidate is better than two anchors, so position 2.")),
    *((ONE, answer, "it holds 0") for answer in ('{"position": 2', '{"position": 2}</think>')),
    *((ONE, answer, "it holds 0") for answer in ("word " * 200_000, "{" * 500_000, '{"position": ' + " " * 500_000)),
    (ONE, "{}", "the key `position` exactly once"),
    *((ONE, answer, "not valid JSON") for answer in ("{the best one}", '{"position": 2,}', "{\x00}")),
    (ONE, '{"position": <integer from 0 through 3>}', "not valid JSON"),
    (ONE, '{"position": 2} {"position": 2}', "it holds 2"),
    *((ONE, '{"verdict": {"position": 2}' + end, "not an object inside another one") for end in ("}", "")),
    (ONE, '{"verdict": {"position": 2}, "sure": {}}', "it holds 2"),
    (ONE, '{"position": {"position": 2}}', "not an object inside another one"),
    (ONE, '{"position": 2, "position": 2}', "exactly once"),
    (ONE, '{"Position": 2}', "exactly once"),
    (ONE, '{"position": 7}', "integer from 0 through 3, not 7"),
    (ONE, '{"position": "\ud800"}', "from 0 through 3"),
    (ONE, '<think>{"position": 2}', "ends inside its thinking block"),
    (ONE, '<think>1?</think> <think>No, {"position": 2}', "ends inside its thinking block"),
    (ONE, "{}" * 200_000, "it holds 200000"),
    (ONE, '{"position": 1' + "0" * 10_000 + "}", "not valid JSON"),
    (ONE, '{"position": [0' + ", 0" * 200_000 + "]}", "not [0, 0, 0"),
    (ONE, '{"position": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    (score_verdict(), '{"score": 12}', "a score must be an integer from 0 through 10, not 12"),
    (scores_verdict(), '{"scores": [3, 12]}', "a score must be an integer from 0 through 10, not 12"),
    (scores_verdict(), '{"scores": [3]}', "a list of 2 integers, not [3]"),
    (winner_verdict(("A", "B")), '{"winner": "tie"}', '`winner` must be one of A, B, not "tie"'),
    (SOME, '{"order": [4, 0]}', "each of [4, 0, 11] exactly once, not [4, 0]"),
    (SOME, '{"order": ["R4", "R0", "R11"]}', '`order` must be a list of integers, not ["R4"'),
    (order_verdict((1, 0)), '{"order": [true, false]}', "a list of integers, not [true, false]"),
    (CHOICE, '{"keep_anchor_ids": ["L0"], "add_rollout_ids": []}', 'ids among A0, A1, not ["L0"]'),
    (CHOICE, '{"keep_anchor_ids": ["A0"], "add_rollout_ids": []}', '2 different ids in all, not ["A0"]'),
    (CHOICE, '{"keep_anchor_ids": ["A0", "A0"], "add_rollout_ids": []}', 'ids in all, not ["A0", "A0"]'),
    (CHOICE, '{"add_rollout_ids": ["R0"]}', "must have the key `keep_anchor_ids`"),
)


def test_verdict_parse_names_the_fault_of_an_answer():
    for verdict, answer, part in FAULTS:
        with pytest.raises(VerdictError) as caught:
            verdict.parse(answer)
        assert part in str(caught.value) and len(str(caught.value)) < 400, answer[:80]


DRAFT = 'Okay, the output has to look like {"position": 1} and nothing else. Let me read'
WHOLE = [  # whole although the answer was cut off: the verdict comes first, or behind a closed thought
    '{"position": 1}. Because',
    '\n```json\n{"position": 1}\n```\nBecause',
    '``` {"position": 1}',
    DRAFT + '</think>So {"position": 1}, as',
    '<thinking>{}</thinking>{"position": 1}',
    '[THINK]{}[/THINK]{"position": 1} as',
    '◁think▷2?◁/think▷{"position": 1}',
    '<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{"position": 1}',
]


def test_verdict_parse_takes_no_draft_of_an_answer_that_was_cut_off():
    assert ONE.parse(DRAFT) == 1, "a whole answer may say something first"
    for draft in (DRAFT, "x" + WHOLE[0], "So:\n" + WHOLE[1], DRAFT + WHOLE[0], "Let me think"):
        with pytest.raises(VerdictError, match="cut off before its verdict"):
            ONE.parse(draft, cut_off=True)
    for opened in ("<Thinking>", "[THINK]", "◁think▷", "<|channel|>analysis<|message|>", "<seed:think>"):
        with pytest.raises(VerdictError, match="ends inside its thinking block"):
            ONE.parse(opened + DRAFT)
    assert [ONE.parse(answer, cut_off=True) for answer in WHOLE] == [1] * len(WHOLE)


def test_verdict_parse_reads_a_string_with_braces_or_tags():
    for why in ("it says {x}", "{", '\\"}', "no <think> tag"):
        assert ONE.parse(f'{{"position": 1, "why": "{why}"}}') == 1
    with pytest.raises(VerdictError, match="inside another one"):
        ONE.parse('{"note": {"position": 1}}')


PIECES = [*'{ } [ ] "position" "order" : , 0 -1 4 11 true </think> <think>'.split(), " "]


@settings(max_examples=400)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
@example('{"order": [4, 0, 11]} {"order": "\ud800"}')
def test_verdict_parse_gives_a_valid_verdict_or_a_verdict_error(text):
    for form in (FORMS["position among 2"], FORMS["order of three"]):
        try:
            verdict = form.verdict.parse(text)
        except VerdictError:
            continue
        assert form.valid(verdict)
