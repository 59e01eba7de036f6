"""The tags around a thought, as the families of models write them."""

import re
from collections.abc import Iterable

TAG = "(?:[a-z]+[:_])?(?:think|thinking|thought|reasoning)"
THOUGHT_BEGINS = re.compile(
    rf"<{TAG}>|\[THINK\]|◁think▷|<\|(?:begin_of_thought|START_THINKING)\|>"
    r"|<\|channel\|>(?:analysis|commentary)<\|message\|>|<(?:\|channel|unused94)>thought",
    re.I,
)
OWN = (
    r"\[/THINK\]|◁/think▷|<\|(?:end_of_thought|END_THINKING)\|>|<\|channel\|>final<\|message\|>"
    r"|<(?:channel\||unused95)>"
)
ENDS = re.compile(rf"</{TAG}>|{OWN}", re.I)
PLAIN_ENDS = re.compile(rf"</think>|{OWN}", re.I)
TURN_ENDS = r"<\|(?:im_end|eot_id|end|endoftext|end_of_text)\|>|<(?:end_of_turn|turn\|)>"
TAGGED = re.compile(
    rf"\s*(?:<([^<>/\s]{{1,40}})>.*?</\1>|\[([A-Z_]{{2,40}})\].*?\[/\2\]|analysis.*?assistantfinal|<\|\w+\|>"
    rf"|{THOUGHT_BEGINS.pattern})|.*?(?:{TURN_ENDS}|</think>|{OWN})",
    re.DOTALL | re.IGNORECASE,
)
"""A text that begins with a tag and closes it later, or with a control token, or that holds an end of thought or turn.

Without special tokens, Harmony's channels are words.
"""


def after_thought(text: str) -> tuple[str, bool]:
    """Return what follows the last thought that is closed, and whether there is one."""
    # A closing tag alone counts: a prompt may end in the opening one.
    ends = [tag.end() for tag in ENDS.finditer(text)]
    return (text[ends[-1] :], True) if ends else (text, False)


def answer_of(text: str) -> tuple[str, bool]:
    """Return the answer in free text, and whether a thought stands before it. It is empty inside a thought."""
    text, thought = text.lstrip(), False
    while opened := THOUGHT_BEGINS.match(text):
        end = ENDS.search(text, opened.end())
        text, thought = (text[end.end() :].lstrip(), True) if end else ("", False)
    ends = [tag.end() for tag in PLAIN_ENDS.finditer(text)]  # free text may quote a tag such as `</reasoning>`
    return (text[ends[-1] :].strip(), True) if ends else (text.rstrip(), thought)


def tag_fault(answers: Iterable[str]) -> str | None:
    """Return what is odd if most of these answers are [`TAGGED`], or `None`. Any of them may quote a tag."""
    matches = [TAGGED.match(answer) for answer in answers if answer]
    tagged = [match[0] for match in matches if match]
    if len(tagged) <= len(matches) / 2:
        return None
    first = tagged[0] if len(tagged[0]) <= 50 else f"{tagged[0][:25]}...{tagged[0][-22:]}"
    what = "begin with a tag that closes later, or go on after the end of their turn, such as"
    return f"{len(tagged)} of {len(matches)} {what} {first!r}"


def in_thought(text: str) -> bool:
    """Return whether a text opens a thought and does not close it."""
    return THOUGHT_BEGINS.search(after_thought(text)[0]) is not None
