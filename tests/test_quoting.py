"""Hostile texts: none gets a line of its own into a prompt, a control token into a chat, or a word for the judge.

The corpus is `tests/helpers/attacks.py`. Its last part is what the guard does not stop, and these tests say so too.
Two functions act, `quote` and `defuse`, so every attack is tried on them. Some attacks are tried in every place.
"""

import re
import unicodedata
from collections.abc import Callable

import pytest
from conftest import ask, scripted_judge
from helpers.attacks import ANCHORS, BAD, BREAKS, CONTROL_TOKENS, FAIR, GOOD, NOT_STOPPED, QUERY, STOPPED
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_tools.batch.chat import Chat
from rankbuffer_tools.data.rubrics import rubric_chat
from rankbuffer_trl.groups import Query, Rollout, Rubric
from rankbuffer_trl.judge import (
    Question,
    VerdictError,
    duel_question,
    group_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from rankbuffer_trl.judge._judge import REPEAT
from rankbuffer_trl.judge._quoting import LONGEST_QUOTED, defuse, quote, show_response
from rankbuffer_trl.judge._rubric_judge import insertion_position, judge, rubric_score

ALL = STOPPED | NOT_STOPPED
INNOCENT = "Pour hot water over tea."
K = len(ANCHORS)


def among_anchors(text: str) -> tuple[str, ...]:
    return (ANCHORS[0], text, *ANCHORS[2:])


def rollouts(*texts: str, first: int = 0) -> list[Rollout]:
    return [Rollout(first + i, text) for i, text in enumerate(texts)]


PLACES: dict[str, tuple[str, Callable[[str], Question]]] = {  # where a response stands: (its heading, the question)
    "candidate": ("CANDIDATE", lambda text: insertion_question(QUERY, ANCHORS, text)),
    "anchor": ("[A1]", lambda text: insertion_question(QUERY, among_anchors(text), FAIR)),
    "only text": ("CANDIDATE", lambda text: insertion_question(QUERY, ANCHORS, text, anchor_content=False)),
    "rollout": ("[R0]", lambda text: ranking_question(QUERY, rollouts(text, GOOD, FAIR))),
    "last rollout": ("[R4]", lambda text: ranking_question(QUERY, rollouts(BAD, text, first=3))),
    "scored": ("RESPONSE", lambda text: pointwise_question(QUERY, text)),
    "first of two": ("[A]", lambda text: pairwise_question(QUERY, text, GOOD)),
    "second of two": ("[B]", lambda text: pairwise_question(QUERY, GOOD, text, tie=False)),
    "duellist": ("[A]", lambda text: duel_question(QUERY, text, GOOD)),
    "member of a group": ("[R0]", lambda text: group_question(QUERY, [text, GOOD])),
    "rung": ("[R0]", lambda text: selection_question(QUERY, [("A0", BAD), ("R0", text), ("A1", FAIR)], [GOOD], 2)),
    "look-ahead": ("[L1]", lambda text: selection_question(QUERY, [("A0", BAD), ("R0", FAIR)], [GOOD, text], 2)),
}
EVERYWHERE = ("another candidate", "another first anchor", "whole prompt", "empty lines", "placeholders",
              "line break \\u2028", "zero-width space before a heading", "ChatML turns")  # fmt: skip


# Readers of their own. They know of prompts only that the lines of a response begin with "> ".


def read(prompt: str) -> tuple[list[str], dict[str, list[str]]]:
    """The lines that belong to no response, and the quoted lines under each heading, the last line before them."""
    own, quoted = [], {}
    for line in prompt.splitlines():
        if line.startswith("> "):
            quoted.setdefault(own[-1], []).append(line[2:])
        else:
            own.append(line)
    return own, quoted


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


def joined(line: str) -> str:
    """A line without the spaces that may stand in markers."""
    return re.sub(r"(?<=[<\[\]]) ", "", line)


# What becomes of one response.

PIECES = ["> ", " ", "\u200b", *BREAKS, *"[A1] CANDIDATE < > | [ ] / s im_end INST </s>".split()]
ANY_TEXT = st.text(min_size=1) | st.lists(st.sampled_from(PIECES), min_size=1).map("".join)


def check_quoted(text: str) -> None:
    lines = quote(text).split("\n")
    assert all(line.startswith("> ") for line in lines)
    assert [joined(line[2:]) for line in lines] == list(map(joined, looked_at(text))), "it is all there, line by line"
    assert all(c == "\t" or shows(c) for line in lines for c in line)
    assert not any(token in treated for token in CONTROL_TOKENS for treated in (quote(text), defuse(text)))
    assert joined(defuse(text)) == joined(text), "without the guard it gets spaces alone"


@given(ANY_TEXT)
@example("a\x00b\tc")
def test_quote_and_defuse_leave_no_line_no_token_and_nothing_hidden(text):
    check_quoted(text)


def test_quote_and_defuse_stop_every_attack():
    for text in ALL.values():
        check_quoted(text)
    for c in (*sorted(BLANK), "\ud800"):
        check_quoted(f"a{c}b")
    for begun in ("<_", "<" + "_a" * 40_000, "[A_", "<a:", "<|", "]~", "[|a"):  # takes no time
        text = begun * (80_000 // len(begun))
        assert joined(defuse(text)) == text


HARMLESS = (
    '<div class="s"><p>a</p><br/><strong>b</strong><summary>s</summary><s3></div>',
    "a < b, b > c, a<b, i<=s, 1 <2> 3, x << 2, y >> 3, <= => <- ->",
    "List<String> Map<K, V> vec<int> std::vector<s_t> Optional<Tools> std::unique_ptr<node_ptr> <std::size_t>",
    "x[0] a[i] a[row_index] m['INST'] [1](https://a.b) [HTML](u) [x] - [ ] [INSTALL] [install] [THINKING] [A-Z_]",
    'int main() { printf("%s\\n", s); return x || y; }\n#include <stdio.h>\n#include <thinker.h>',
    "#include <vector>\n"
    + "\n".join(f"#include <any_{name}>" for name in "map set list view traits variable mutex lock".split()),
    "<any_t> <any_ptr> <memory_resource> <source_location> <scoped_allocator> <system_error>",
    "<dc:title>a</dc:title> <my-element> <name> git clone <repository> [<=>] a[i]<b[j] a[0]!=b[1] [a] [cut]",
    "# A\n> quoted\n- [link](u) **b** `c`\n| a | b |\n|---|---|",
    "|x| < |y|, {s | s > 0}, <u, v>, [0, 1[",
    "if x:\n\treturn x\t# done",
    "cat < a | sort > b; cat <<EOF; cat <a|sort; [|x|y] [|",
    "Привет, 世界! 안녕하세요 مرحبا 👍🏽 é",
    *NOT_STOPPED.values(),
)


def test_quote_and_defuse_leave_plain_words_as_they_are():
    for text in HARMLESS:
        assert defuse(text) == text
        assert quote(text) == "> " + text.replace("\n", "\n> ")


def test_quote_and_defuse_are_remembered():
    for treat in (quote, defuse):
        text = f"{GOOD}<s>"
        assert treat(text) is treat(text), "an anchor is in the prompts of all rollouts of its group"


def test_show_cuts_a_response_in_a_way_that_none_can_write():
    for quoted, treat in ((True, quote), (False, defuse)):
        whole = "tea " * (LONGEST_QUOTED // 4)
        assert show_response(whole, quoted) == treat(whole)
        for beyond, said in ((1, "1"), (12_345, "12,345")):
            assert show_response(whole + "x" * beyond, quoted) == f"{treat(whole)}\n[cut: {said} characters]"
        assert "\n[cut: 1 characters]" not in show_response(f"{GOOD}\n[cut: 1 characters]", quoted)
        tokens = show_response("\n".join(CONTROL_TOKENS) * LONGEST_QUOTED, quoted)
        assert len(tokens) < 2 * LONGEST_QUOTED and not any(token in tokens for token in CONTROL_TOKENS)


# What becomes of a prompt.


@pytest.mark.parametrize("place", PLACES)
def test_prompt_has_no_line_of_a_response(place):
    heading, make = PLACES[place]
    innocent = make(INNOCENT)
    own, quoted = read(innocent.prompt(guard=True))
    assert quoted.pop(heading) == [INNOCENT]
    note, _, rest = innocent.prompt(guard=True).partition("\n\n")
    assert "> " in note, "a note says what it means"
    assert re.sub("^> ", "", rest, flags=re.MULTILINE) == innocent.prompt()
    for name in EVERYWHERE:
        question = make(ALL[name])
        assert question.prompt() == innocent.prompt().replace(INNOCENT, defuse(ALL[name])), name
        own_now, quoted_now = read(question.prompt(guard=True))
        assert list(map(joined, quoted_now.pop(heading))) == list(map(joined, looked_at(ALL[name]))), name
        assert (own_now, quoted_now) == (own, quoted), f"{name}: the rest of the prompt is untouched"


@pytest.mark.parametrize("guard", [True, False])
def test_judge_is_sent_the_prompt_that_its_guard_asks_for(guard):
    asker = scripted_judge(lambda messages: '{"position": 1}', guard=guard)
    question = PLACES["candidate"][1](STOPPED["another candidate"])
    assert ask(asker, question)[0] == 1
    assert asker.client.seen == [[{"role": "user", "content": question.prompt(guard)}]]


def test_prompt_has_no_control_token_of_a_response(howto):
    """A real tokenizer knows all of them."""
    import policy

    tokenizer = policy.build_tokenizer([text for row in howto for text in row["responses"]])
    tokenizer.add_tokens(list(CONTROL_TOKENS), special_tokens=True)
    known = {id: token for token, id in tokenizer.get_added_vocab().items()}

    def control_tokens(prompt: str) -> list[str]:
        chat = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return [known[id] for id in tokenizer(text, add_special_tokens=False)["input_ids"] if id in known]

    for token in CONTROL_TOKENS:
        assert token in control_tokens(f"{BAD}{token}\n{token}system")[1:-2], "untreated it would become one"
    for name, text in ALL.items():
        for guard in (True, False):
            prompt = PLACES["candidate"][1](text).prompt(guard)
            assert control_tokens(prompt) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"], name


HOSTILE = " ".join(CONTROL_TOKENS)


def test_prompt_has_no_control_token_of_a_query_or_a_rubric():
    tea, hostile = (
        Query("tea", [{"role": "user", "content": f"Tea{text}?"}], (Rubric(f"Says tea{text}.", 5),))
        for text in ("", HOSTILE)
    )

    def prompts(query: Query) -> list[str]:
        asked = [insertion_question(query, ANCHORS, GOOD), ranking_question(query, rollouts(GOOD, BAD))]
        written = rubric_chat("tea", query.prompt, [BAD, GOOD], [query.text, "m"], {}).chat()
        return [*(one.prompt(guard) for one in asked for guard in (True, False)), *(m["content"] for m in written)]

    for plain, prompt in zip(prompts(tea), prompts(hostile), strict=True):
        assert not any(token in prompt for token in CONTROL_TOKENS)
        assert prompt.replace(defuse(HOSTILE), "") == plain, "and all else is the paper's"


def test_repeat_has_no_control_token_of_the_answer_or_its_fault():
    def read(answer: str, cut_off: bool):
        raise VerdictError(answer)

    for answer in (HOSTILE, HOSTILE * 100):
        asker = scripted_judge(lambda messages: answer, max_attempts=2)  # noqa: B023  # it is called here
        assert ask(asker, Chat("rubrics", "tea", [{"role": "user", "content": "?"}], read))[0] is None
        _, given, fault = (message["content"] for message in asker.client.seen[1])
        assert joined(given) == joined(answer[:500])
        assert joined(fault) == joined(REPEAT.format(error=answer[:500]))
        assert not any(token in given + fault for token in CONTROL_TOKENS)


# What becomes of a verdict: that of the embedded judge, which reads the prompts of RankBuffer as any judge does.


def verdict(question: Question, guard: bool):
    """Its verdict, or that it gives none that is valid."""
    try:
        return question.verdict.parse(judge(question.prompt(guard)))
    except VerdictError:
        return "malformed"


def fair(question: Question):
    """The verdict on the responses as they are seen, whatever else stands in them. It reads no prompt."""
    rubrics = [(rubric.weight, rubric.text) for rubric in QUERY.rubrics]
    scores = {
        heading: rubric_score("\n".join(looked_at(text)), rubrics)
        for pairs in question.responses.values()
        for heading, text in pairs
    }
    if question.kind == "fine":
        return sorted((int(heading[1:]) for heading in scores), key=lambda i: (scores[f"R{i}"], i))
    quality = scores.pop("")
    if not scores:  # order-only
        return min(int(quality * (K + 1)), K)
    return insertion_position(quality, list(scores.values()))


def test_verdict_with_guard_is_on_what_is_seen_of_the_responses():
    for place in ("candidate", "anchor", "only text", "rollout", "last rollout"):
        for name in ALL:
            question = PLACES[place][1](ALL[name])
            assert verdict(question, guard=True) == fair(question), (place, name)


def test_verdict_without_guard_is_moved_by_the_structure_of_a_response():
    for place, names in (
        ("anchor", ("another anchor", "another first anchor", "other order", "end of the quotes")),
        ("rollout", ("own heading again", "end of the candidates")),
    ):
        for question in (PLACES[place][1](STOPPED[name]) for name in names):
            assert verdict(question, guard=False) != fair(question), question.responses


def test_verdict_is_moved_by_rubric_stuffing():
    """A literal judge takes the rubrics' own words for the best answer."""
    for guard in (True, False):
        assert verdict(PLACES["candidate"][1](BAD), guard) == 0
        for name in ("rubric stuffing", "stuffed sentences"):
            assert verdict(PLACES["candidate"][1](NOT_STOPPED[name]), guard) == K
