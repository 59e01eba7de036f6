"""Write rubrics for a query from its ranked responses, with the paper's prompts.

`prompts/rubrics_system.txt` and `prompts/rubrics_user.txt` are the paper's, word for word (appendix "Rubric
Generation"). They say "seven responses". For another number of responses, only the word "seven" changes.
"""

from pathlib import Path
from typing import Any

from rankbuffer_trl.data import text_fault
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import VerdictError, defuse, fill, read_object, shorten_json, show_response

from ..batch.chat import Chat

PROMPTS = Path(__file__).parent / "prompts"
SYSTEM, USER = (
    (PROMPTS / f"rubrics_{role}.txt").read_text(encoding="utf-8").rstrip("\n") for role in ("system", "user")
)
NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
TEMPERATURE, MAX_TOKENS = 0.2, 1024  # the paper's decoding
MIN_RUBRICS, MAX_RUBRICS = 3, 5  # in an answer


def rubric_chat(
    query_id: str, prompt: list[dict], responses: list[str], models: list[str] | None, request: dict[str, Any]
) -> Chat:
    """Ask for the rubrics of one query. The responses, two at least, stand from worst to best."""
    n = len(responses)
    head, _, _ = USER.partition("[Rank 1 |")
    head += "\n\n".join(f"[Rank {i} | model={{MODEL_{i}}}]\n{{ANSWER_{i}}}" for i in range(1, n + 1))
    values = {"{QUERY}": defuse(Query(query_id, prompt, ()).text)}  # as a judge reads it, with chat markers broken up
    # The paper's prompt names the best one first.
    best_first = zip(reversed(responses), reversed(models or ["unknown"] * n), strict=True)
    for i, (response, model) in enumerate(best_first, start=1):
        values |= {f"{{ANSWER_{i}}}": show_response(response, quoted=False), f"{{MODEL_{i}}}": defuse(model)}
    messages = [
        {"role": "system", "content": for_count(SYSTEM, n)},
        {"role": "user", "content": fill(for_count(head, n), values)},
    ]
    return Chat("rubrics", query_id, messages, read_rubrics, request)


def for_count(template: str, n: int) -> str:
    """Rewrite a template for `n` responses instead of seven."""
    word = NUMBER_WORDS[n] if n < len(NUMBER_WORDS) else str(n)
    # The one word of the paper's prompts that changes.
    return template.replace("seven", word).replace("Seven", word.capitalize())


def read_rubrics(answer: str, cut_off: bool = False) -> list[dict[str, Any]]:
    """Read the rubrics of an answer: 3 to 5 of them, each `{"text": text, "weight": integer 1 to 5}`.

    Text around the JSON object is skipped: a code fence, a sentence, a thinking block. Everything else is a
    [`VerdictError`] that the model is told. So is a draft in an answer that was cut off, see [`read_object`].
    """
    answered, _ = read_object(answer, ["rubrics"], cut_off)
    rubrics = answered["rubrics"]
    if not isinstance(rubrics, list) or not MIN_RUBRICS <= len(rubrics) <= MAX_RUBRICS:
        count = len(rubrics) if isinstance(rubrics, list) else type(rubrics).__name__
        raise VerdictError(f"`rubrics` must be a list of {MIN_RUBRICS} to {MAX_RUBRICS} rubrics, not {count}")
    read = [read_rubric(rubric, i) for i, rubric in enumerate(rubrics, start=1)]
    if len({rubric["text"].casefold() for rubric in read}) < len(read):
        raise VerdictError("two rubrics are the same")
    return read


def read_rubric(rubric: Any, number: int) -> dict[str, Any]:
    """Read one rubric of the list, or raise [`VerdictError`]."""
    if not isinstance(rubric, dict) or not {"text", "weight"} <= rubric.keys():
        raise VerdictError(f"rubric {number} must be an object with `text` and `weight`")
    text, weight = rubric["text"], rubric["weight"]
    if fault := text_fault(text):
        raise VerdictError(f"the text of rubric {number} {fault}")
    if type(weight) is not int or not 1 <= weight <= 5:  # true is an int, too
        raise VerdictError(f"the weight of rubric {number} must be an integer from 1 to 5, not {shorten_json(weight)}")
    return {"text": " ".join(text.split()), "weight": weight}  # a prompt has one line per rubric
