"""The tags around a thought, as the families of models write them."""

import re

TAG = "(?:[a-z]+[:_])?(?:think|thinking|thought|reasoning)"
THOUGHT_BEGINS = re.compile(
    rf"<{TAG}>|\[THINK\]|◁think▷|<\|(?:begin_of_thought|START_THINKING)\|>"
    r"|<\|channel\|>(?:analysis|commentary)<\|message\|>",
    re.I,
)
OWN = r"\[/THINK\]|◁/think▷|<\|(?:end_of_thought|END_THINKING)\|>|<\|channel\|>final<\|message\|>"
ENDS = re.compile(rf"</{TAG}>|{OWN}", re.I)
PLAIN_ENDS = re.compile(rf"</think>|{OWN}", re.I)


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


def in_thought(text: str) -> bool:
    """Return whether a text opens a thought and does not close it."""
    return THOUGHT_BEGINS.search(after_thought(text)[0]) is not None
