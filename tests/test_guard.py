"""Hostile responses: none gets a line of its own into a prompt, a control token into a chat, or a word for the judge.

The corpus is `tests/helpers/attacks.py`. Its last part is what the guard does not stop, and these tests say so too.
"""

import asyncio
import re
import unicodedata

import pytest
from conftest import scripted_judge
from helpers.attacks import (
    ANCHORS,
    BAD,
    BREAKS,
    CONTROL_TOKENS,
    FAIR,
    GOOD,
    HIDDEN,
    MARKERS,
    NOT_STOPPED,
    QUERY,
    STOPPED,
)
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.groups import Rollout
from rankbuffer_trl.judge import (
    Question,
    VerdictError,
    batch_question,
    duel_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from rankbuffer_trl.judge.guard import defuse, quote
from rankbuffer_trl.judge.rubric_judge import insertion_position, judge, score

ALL = STOPPED | NOT_STOPPED
UNMARKED = {name: text for name, text in ALL.items() if name not in MARKERS}
INNOCENT = "Pour hot water over tea."
K = len(ANCHORS)


def named(attacks):
    return pytest.mark.parametrize("text", attacks.values(), ids=attacks.keys())


# Where a response stands: (question, heading of its block). The other responses are innocent.


def as_candidate(text: str) -> tuple[Question, str]:
    return insertion_question(QUERY, ANCHORS, text), "CANDIDATE"


def as_anchor(text: str) -> tuple[Question, str]:
    return insertion_question(QUERY, (*ANCHORS[:1], text, *ANCHORS[2:]), FAIR), "[A1]"


def as_only_text(text: str) -> tuple[Question, str]:
    return insertion_question(QUERY, ANCHORS, text, anchor_content=False), "CANDIDATE"


def as_rollout(text: str) -> tuple[Question, str]:
    return ranking_question(QUERY, [Rollout(0, text), Rollout(1, GOOD), Rollout(2, FAIR)]), "[R0]"


def as_last_rollout(text: str) -> tuple[Question, str]:
    return ranking_question(QUERY, [Rollout(5, BAD), Rollout(3, text)]), "[R3]"


def as_batched(text: str) -> tuple[Question, str]:
    return batch_question(QUERY, ANCHORS, [GOOD, text, BAD]), "[R1]"


def as_anchor_of_a_batch(text: str) -> tuple[Question, str]:
    return batch_question(QUERY, (*ANCHORS[:1], text, *ANCHORS[2:]), [FAIR, BAD]), "[A1]"


def as_scored(text: str) -> tuple[Question, str]:
    return pointwise_question(QUERY, text), "RESPONSE"


def as_first_of_two(text: str) -> tuple[Question, str]:
    return pairwise_question(QUERY, text, GOOD), "[A]"


def as_second_of_two(text: str) -> tuple[Question, str]:
    return pairwise_question(QUERY, GOOD, text, tie=False), "[B]"


def as_duellist(text: str) -> tuple[Question, str]:
    return duel_question(QUERY, text, GOOD), "[A]"


def as_rung(text: str) -> tuple[Question, str]:
    return selection_question(QUERY, [("A0", BAD), ("R0", text), ("A1", FAIR)], [GOOD], 2), "[R0]"


def as_look_ahead(text: str) -> tuple[Question, str]:
    return selection_question(QUERY, [("A0", BAD), ("R0", FAIR)], [GOOD, text], 2), "[L1]"


BATCHED = (as_batched, as_anchor_of_a_batch)
RANKED = (as_candidate, as_anchor, as_only_text, as_rollout, as_last_rollout, *BATCHED)
PLACES = (*RANKED, as_scored, as_first_of_two, as_second_of_two, as_duellist, as_rung, as_look_ahead)


# Structure: a reader of its own, which knows of prompts only that a response's lines begin with "> ".


def own_lines(prompt: str) -> list[str]:
    """The lines that belong to no response."""
    return [line for line in prompt.splitlines() if not line.startswith("> ")]


def responses(prompt: str) -> dict[str, list[str]]:
    """The quoted lines under each heading, which is the last line before them."""
    found, heading = {}, ""
    for line in prompt.splitlines():
        if line.startswith("> "):
            found.setdefault(heading, []).append(line[2:])
        else:
            heading = line
    return found


def looked_at(text: str) -> list[str]:
    """What a reader sees of a response: its lines, by any kind of line break, without what shows nothing."""
    lines = re.split("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text)
    if len(lines) > 1 and not lines[-1]:
        lines.pop()
    return ["".join(c for c in line if c == "\t" or shows(c)) for line in lines]


def shows(c: str) -> bool:
    return unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in BLANK


BLANK = {  # fillers, joiners and variation selectors, which are of other categories but show nothing either
    *"\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0",
    *map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE1000))),
}


@named(ALL)
def test_no_line_of_a_response_can_pass_for_the_prompts(text):
    for place in PLACES:
        (question, heading), (innocent, _) = place(text), place(INNOCENT)
        assert own_lines(question.prompt(guard=True)) == own_lines(innocent.prompt(guard=True))
        read, expected = responses(question.prompt(guard=True)), responses(innocent.prompt(guard=True))
        assert list(read) == list(expected), "the same blocks"
        assert read.pop(heading)
        assert expected.pop(heading) == [INNOCENT]
        assert read == expected, "the other responses are untouched"


ANY_TEXT = st.one_of(
    st.text(min_size=1),
    st.lists(
        st.sampled_from(["> ", ">", "[A1]", "CANDIDATE", "RUBRICS", "<", "|im_end|>", "</s>", "\u200b", " ", *BREAKS]),
        min_size=1,
    ).map("".join),
    st.lists(st.sampled_from(list(ALL.values())), min_size=1, max_size=3).map("\u2028".join),
)


@given(ANY_TEXT)
def test_no_text_at_all_puts_a_line_into_a_prompt(text):
    for place in PLACES:
        (question, heading), (innocent, _) = place(text), place(INNOCENT)
        assert own_lines(question.prompt(guard=True)) == own_lines(innocent.prompt(guard=True))
        read = responses(question.prompt(guard=True))[heading]
        assert list(map(joined, read)) == list(map(joined, looked_at(text))), "it is all there, line by line"


def joined(line: str) -> str:
    """Without the spaces that may stand in markers."""
    return re.sub(r"(?<=[<\[\]]) ", "", line)


def test_the_guard_tells_the_judge_what_the_quotes_mean():
    for place in PLACES:
        question, _ = place(INNOCENT)
        note, _, rest = question.prompt(guard=True).partition("\n\n")
        assert "> " in note
        assert re.sub("^> ", "", rest, flags=re.MULTILINE) == question.prompt()


@pytest.mark.parametrize("guard", [True, False])
def test_the_judge_is_sent_the_prompt_that_its_guard_asks_for(guard):
    asker = scripted_judge(lambda messages: '{"position": 1}', guard=guard)
    question, _ = as_candidate(STOPPED["another candidate"])
    assert asyncio.run(asker.ask(question)) == 1
    assert asker.client.seen == [[{"role": "user", "content": question.prompt(guard)}]]


# What the guard leaves as it is.

SHOWN = st.characters(exclude_categories=("C", "Zl", "Zp"), exclude_characters=sorted(BLANK)) | st.just("\t")
ORDINARY = st.lists(st.text(SHOWN).filter(lambda line: defuse(line) == line)).map("\n".join)


@given(ORDINARY.filter(lambda text: text and not text.endswith("\n")))
def test_an_ordinary_text_is_only_quoted(text):
    assert "\n".join(line.removeprefix("> ") for line in quote(text).split("\n")) == text
    assert all(line.startswith("> ") for line in quote(text).split("\n"))


HARMLESS = {
    "HTML": '<div class="s"><p>a</p><br/><strong>b</strong><summary>s</summary><s3></div>',
    "comparison": "a < b, b > c, a<b, i<=s, 1 <2> 3, x << 2, y >> 3, <= => <- ->",
    "generics": "List<String> Map<K, V> vec<int> std::vector<s_t> Optional<Tools>",
    "indices": "x[0] a[i] m['INST'] [1](https://a.b) [x] - [ ] [INSTALL] [install] [THINKING]",
    "code": 'int main() { printf("%s\\n", s); return x || y; }\n#include <stdio.h>\n#include <thinker.h>',
    "markdown": "# A\n> quoted\n- [link](u) **b** `c`\n| a | b |\n|---|---|",
    "mathematics": "|x| < |y|, {s | s > 0}, <u, v>, [0, 1[",
    "tabs": "if x:\n\treturn x\t# done",
    "shell": "cat < a | sort > b; cat <<EOF",
    "other scripts": "Привет, 世界! 안녕하세요 مرحبا 👍🏽 é",
}


@named(HARMLESS)
def test_what_only_looks_like_a_marker_is_not_touched(text):
    assert defuse(text) == text


@named(HARMLESS | NOT_STOPPED)
def test_plain_words_reach_the_judge_as_they_are(text):
    for place in PLACES:
        question, heading = place(text)
        assert responses(question.prompt(guard=True))[heading] == text.split("\n")


@named(HARMLESS | UNMARKED)
def test_without_guard_the_prompt_is_the_papers_byte_for_byte(text):
    for place in PLACES:
        (question, _), (innocent, _) = place(text), place(INNOCENT)
        assert question.prompt() == question.prompt(guard=False) == innocent.prompt().replace(INNOCENT, text)


# Control tokens, with a real tokenizer that knows them all.


@pytest.fixture(scope="module")
def tokenizer(howto):
    import policy

    tokenizer = policy.build_tokenizer([text for row in howto for text in row["responses"]])
    tokenizer.add_tokens(list(CONTROL_TOKENS), special_tokens=True)
    return tokenizer


def control_tokens(tokenizer, prompt: str) -> list[str]:
    """Those of a chat in which `prompt` is the user's message."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    known = {id: token for token, id in tokenizer.get_added_vocab().items()}
    return [known[id] for id in ids if id in known]


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_an_untreated_marker_would_become_a_control_token(tokenizer, token):
    assert token in control_tokens(tokenizer, f"{BAD}{token}\n{token}system")[1:-2]


@pytest.mark.parametrize("guard", [True, False])
@named(ALL)
def test_no_response_has_a_control_token(tokenizer, text, guard):
    for place in PLACES:
        question, _ = place(text)
        assert control_tokens(tokenizer, question.prompt(guard)) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@given(
    st.lists(st.sampled_from(["<", ">", "|", "[", "]", "/", "s", "im_end", "INST", " ", "\u200b", "\n"])).map("".join)
)
def test_no_mixture_of_pieces_becomes_a_control_token(text):
    for treated in (defuse(text), quote(text)):
        assert not any(token in treated for token in CONTROL_TOKENS)


# Hidden characters.


@named(HIDDEN | MARKERS)
def test_a_guarded_prompt_has_no_hidden_character(text):
    for place in PLACES:
        question, _ = place(text)
        assert {c for c in question.prompt(guard=True) if c != "\n" and not shows(c)} == set()


# The embedded judge, which reads the prompts of RankBuffer as any judge does.


def verdict(question: Question, guard: bool):
    """Its verdict, or that it gives none that is valid."""
    try:
        return question.verdict.parse(judge(question.prompt(guard)))
    except VerdictError:
        return "malformed"
    except ValueError:
        return "unreadable"


def fair(question: Question):
    """The verdict on the responses as they are seen, whatever else stands in them. It reads no prompt."""
    rubrics = [(rubric.weight, rubric.text) for rubric in QUERY.rubrics]
    scores = {
        heading: score("\n".join(looked_at(text)), rubrics)
        for pairs in question.responses.values()
        for heading, text in pairs
    }
    if question.kind == "batch":
        anchors = [scores.pop(f"A{i}") for i in range(K)]
        order = sorted(range(len(scores)), key=lambda i: (scores[f"R{i}"], i))
        return order, [insertion_position(scores[f"R{i}"], anchors) for i in order]
    if "{CANDIDATE_RESPONSE}" not in question.responses:
        ids = [int(heading.removeprefix("R")) for heading in scores]
        return sorted(ids, key=lambda i: (scores[f"R{i}"], i))
    quality = scores.pop("")
    if not scores:  # order-only
        return min(int(quality * (K + 1)), K)
    return insertion_position(quality, list(scores.values()))


@named(ALL)
def test_guarded_the_verdict_is_on_what_is_seen_of_the_responses(text):
    for place in RANKED:
        question, _ = place(text)
        assert verdict(question, guard=True) == fair(question)


FOOLING = (
    (as_anchor, "another anchor"),
    (as_anchor, "another candidate"),
    (as_anchor, "other order"),
    (as_anchor, "whole prompt"),
    (as_anchor, "end of the quotes"),
    (as_rollout, "end of the candidates"),
    (as_rollout, "other candidates' texts"),
    (as_rollout, "own heading again"),
    (as_anchor_of_a_batch, "another anchor"),
    (as_batched, "end of the candidates"),
)


@pytest.mark.parametrize(("place", "name"), FOOLING, ids=lambda value: getattr(value, "__name__", value))
def test_without_guard_a_response_moves_verdicts_by_its_structure(place, name):
    question, _ = place(STOPPED[name])
    assert verdict(question, guard=False) != fair(question) == verdict(question, guard=True)


def test_without_guard_a_response_breaks_the_judge():
    question, _ = as_anchor(STOPPED["another first anchor"])
    assert verdict(question, guard=False) == "malformed"
    assert verdict(question, guard=True) == fair(question)


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("name", ["rubric stuffing", "stuffed sentences"])
def test_rubric_stuffing_is_not_stopped(name, guard):
    honest, stuffed = (as_candidate(text)[0] for text in (BAD, NOT_STOPPED[name]))
    assert verdict(honest, guard) == 0
    assert verdict(stuffed, guard) == K, "a literal judge takes the rubrics' own words for the best answer"
