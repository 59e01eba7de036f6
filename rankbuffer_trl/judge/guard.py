"""Responses are hostile: a policy under optimisation pressure learns to write whatever moves its judge.

Two layers. `defuse`, which is always on, breaks the markers that a judge's tokenizer would turn into control tokens.
`quote`, the option `judge_guard`, also removes invisible characters and begins every line of a response with `> `, so
that no line of it can pass for a heading, a rubric or an instruction of the prompt. What neither stops: persuasion in
plain words, and text that is tailored to the rubrics. docs/judge.md lists the attacks that are tested.
"""

import re
import unicodedata
from functools import lru_cache

# Control tokens as common chat templates spell them: <|im_end|> and its like (Qwen, Llama 3, GPT, Phi), the full-width
# bars of DeepSeek, Gemma's turns (<turn|> since Gemma 4), sentencepiece's <s>, GLM's [gMASK]<sop>, the brackets of
# Mistral, Llama 2, EXAONE and MiniMax, thinking and tool tags.
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
# Letters and marks by category, though they show nothing: fillers, joiners, variation selectors, reserved tags.
BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]")


def defuse(text: str) -> str:
    """`text` with a space in each chat marker, `< |im_end|>`, which a tokenizer then reads as plain text."""
    return MARKER.sub(lambda match: match.group() + " ", text)


@lru_cache(maxsize=1024)  # an anchor stands in the prompts of all rollouts of its group
def quote(text: str) -> str:
    """`text` defused, without invisible characters, each of its lines after `> `."""
    return "\n".join(f"> {defuse(visible(line))}" for line in text.splitlines())


def visible(line: str) -> str:
    """A line without control, zero-width and direction-changing characters."""
    line = BLANK.sub("", line)
    if line.isprintable():
        return line
    return "".join(c for c in line if c == "\t" or unicodedata.category(c) not in INVISIBLE)
