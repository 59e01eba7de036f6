"""The defence of a judge's prompt against the responses in it.

A policy can learn to write text that manipulates its judge. There are two layers against this. `defuse` is always on.
It breaks the markers that a judge's tokenizer would turn into control tokens. `quote` is the option `judge_guard`. It
also removes invisible characters and begins every line of a response with `> `. No line can then pass for a heading, a
rubric or an instruction of the prompt.

Neither layer stops persuasion in plain words, or text that is tailored to the rubrics. docs/judge.md lists the attacks
that are tested.
"""

import re
import unicodedata
from functools import lru_cache

# Control tokens as common chat templates spell them: those of the form <|im_end|> (Qwen, Llama 3, GPT, Phi), the
# full-width bars of DeepSeek, Gemma's turns (<turn|> since Gemma 4), sentencepiece's <s>, GLM's [gMASK]<sop>, the
# brackets of Mistral, Llama 2, EXAONE and MiniMax, and thinking and tool tags.
MARKER = re.compile(
    r"<(?=[|\uff5c]\S|/?\w+\|>)"
    r"|<(?=/?(?:s|unk|pad|bos|eos|cls|sep|mask|sop|eop|think|tool_call|tool_response|tools?|start_of_turn|end_of_turn"
    r"|start_of_image|end_of_image|image_soft_token|turn|channel|image|audio|unused\d+|reserved_\w+|extra_id_\d+"
    r"|SPECIAL_\d+|[A-Z]+_TOKEN|seed:\w+)>)"
    r"|<(?=</?SYS>>)"
    r"|\[(?=\|\w+\|\])"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|IMG|PREFIX|SUFFIX"
    r"|ARGS|CALL_ID|[gs]?MASK|BOS|EOS|PAD|UNK|unused\d+)\])"
    r"|\](?=~!?b[\[\]])|\[(?=e~\[)"
)

INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Letters and marks by their category, but they show nothing: fillers, joiners, variation selectors, reserved tags.
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")


def defuse(text: str) -> str:
    """Return `text` with a space in each chat marker (`< |im_end|>`), so that a tokenizer reads it as plain text."""
    return MARKER.sub(lambda match: match.group() + " ", text)


@lru_cache(maxsize=1024)  # an anchor is in the prompts of all rollouts of its group
def quote(text: str) -> str:
    """Return `text` defused and without invisible characters. Each line begins with `> `."""
    return "\n".join(f"> {defuse(visible(line))}" for line in text.splitlines())


def visible(line: str) -> str:
    """Return a line without control, zero-width and direction-changing characters."""
    line = BLANK.sub("", line)
    if line.isprintable():
        return line
    return "".join(c for c in line if c == "\t" or unicodedata.category(c) not in INVISIBLE)
