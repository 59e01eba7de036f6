"""The defence of a judge's prompt against the texts in it.

A policy can learn to write text that manipulates its judge, and a public data set can hold such text. There are two
layers against this. `defuse` is always on, for queries, rubrics, responses and the judge's own answers. It breaks the
markers that a judge's tokenizer would turn into control tokens. `quote` is the option `judge_guard`, for responses. It
also removes invisible characters and begins every line of a response with `> `. No line can then pass for a heading, a
rubric or an instruction of the prompt.

A marker is told by its shape, because no list knows the next model. It is one name in brackets, without a space:

* `<...>` with a bar or an underscore, such as `<|im_end|>`, `<turn|>` or `<start_of_turn>`. Types and headers of C++
  stay as they are: `<size_t>`, `<unordered_map>`.
* `[...]` with bars, or with capitals and an underscore, such as `[|user|]` or `[TOOL_CALLS]`.
* a name that could also be a tag of HTML or a label, such as `<s>`, `<think>` or `[INST]`. These are listed below.

The judge then reads `< |im_end|>`, `< start_of_turn>` or `[ INST]`. Tags of HTML, generics such as `List<String>`,
links and indices are not changed. The price is a space in a name such as `<first_name>` of XML.

Neither layer stops persuasion in plain words, or text that is tailored to the rubrics. docs/judge.md lists the attacks
that are tested.
"""

import re
import unicodedata
from functools import lru_cache

# Every part takes time in proportion to the text, however many brackets and underscores a response writes.
MARKER = re.compile(
    r"<(?=[|\uff5c]\S|\]\w|/?\w+\|>)"  # bars, full-width ones (DeepSeek), and <]...[> (MiniMax)
    r"|<(?=/?(?:[^\W_]+:)?[^\W_]*[_\u2581][\w\u2581]*>)"
    r"(?!\w+_(?:t|ptr|list|map|set|view|traits|lock|mutex|variable|resource|location|allocator|error)>)"
    r"|<(?=/?(?:\w+:)?(?:s|unk|pad|cls|sep|mask|[bes]o[a-z]|think|tools?|turn|channel|role|image|audio|AI|\u7528\u6237"
    r"|assistant|(?:unused|ctrl)\d+|0x[\dA-F]{2})(?::\w+)?>)"
    r"|<(?=</?[A-Z]+>>)"
    r"|\[(?=\|\w+\|\])"
    r"|\[(?=/?(?:[A-Z]+_[A-Z_\d]+|INST|USER|THINK|ARGS|IMG|AUDIO|PREFIX|MIDDLE|SUFFIX|[gs]?MASK|[BE]O[ST]|PAD|UNK"
    r"|CLS|SEP|unused\d+)\])"
    r"|\](?=~!?b[\[\]]|!\w~\[)|\[(?=e~\[)"  # MiniMax
    r"|\[(?=cut: )"  # the line that `show_response` writes
)

LONGEST_QUOTED = 100_000
"""Characters of one response that a prompt shows: far more than 4,096 tokens of any answer have."""
TOKENS_PER_MARK = 8
"""Tokens of a quoted response for each mark in front of a line, about."""

INVISIBLE = ("Cc", "Cf", "Cs")  # in a line; the categories Zl and Zp end one
# Letters and marks by their category, but they show nothing: fillers, joiners, variation selectors, reserved tags.
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")


def show_response(response: str, quoted: bool) -> str:
    """Return a response as a prompt shows it: quoted, or else defused."""
    treat, beyond = quote if quoted else defuse, len(response) - LONGEST_QUOTED
    # No response can write the last line, since `MARKER` breaks it.
    return treat(response) if beyond <= 0 else f"{treat(response[:LONGEST_QUOTED])}\n[cut: {beyond:,} characters]"


@lru_cache(maxsize=1024)  # an anchor, a query or a rubric is in the prompts of all rollouts of its group
def defuse(text: str) -> str:
    """Return `text` with a space in each chat marker (`< |im_end|>`), so that a tokenizer reads it as plain text."""
    return MARKER.sub(lambda match: match.group() + " ", text)


@lru_cache(maxsize=1024)
def quote(text: str) -> str:
    """Return `text` defused and without invisible characters. Each line begins with `> `."""
    return defuse("\n".join(f"> {visible(line)}" for line in text.splitlines()))


def visible(line: str) -> str:
    """Return a line without control, zero-width and direction-changing characters."""
    line = BLANK.sub("", line)
    if line.isprintable():
        return line
    return "".join(c for c in line if c == "\t" or unicodedata.category(c) not in INVISIBLE)
