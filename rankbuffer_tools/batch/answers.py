"""Find the answers in the responses of a policy, without its thinking, or refuse to guess."""

from collections.abc import Mapping
from typing import Any

from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.judge import THOUGHT_BEGINS, answer_of, tag_fault
from rankbuffer_trl.rewards import read_answer


class AnswerError(RankBufferError, ValueError):
    """Nobody has said where the answers stand in responses. The message says what to set."""


def refuse_tags(answers: Mapping[str, str], what: str, check: str | None) -> None:
    """Refuse answers most of which begin with a tag that closes later, unless a setting says where they stand."""
    if check is None and (fault := tag_fault(answers.values())):
        raise AnswerError(
            f"{what}: {fault}. If that is thinking, the judge must not see it: set format_check to a regular"
            " expression with a group (?P<answer>...), and take outputs from elsewhere without it. Else set"
            " format_check: none"
        )


def opens_thinking(tokenizer, chat_template_kwargs: Mapping[str, Any]) -> bool:
    """Return whether the chat template ends its prompts inside a thinking block, where responses then start."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=False, add_generation_prompt=True, **chat_template_kwargs
    )
    rendered = rendered.rstrip()  # a template may end in a newline behind its tag
    return any(tag.end() == len(rendered) for tag in THOUGHT_BEGINS.finditer(rendered))


def read_answers(texts: Mapping[str, str], opened: bool, what: str, check: str | None = None) -> dict[str, str]:
    """Return the answers in responses, without their thinking. `opened`: the prompts end inside a thinking block.

    Raises:
        [`AnswerError`]: if all start inside a thinking block and none closes it, or most begin with an unknown tag.
    """
    if check is not None:  # then the setting alone says where the answer stands
        return {id: read_answer(text, check).text for id, text in texts.items()}
    closed = [text for text in texts.values() if answer_of(text)[1]]
    if opened and texts and not closed:
        raise AnswerError(
            f"{what}: the chat template opens a thinking block, and no response closes it. Does the server run with"
            " --reasoning-parser? Start it without. Or is max_new_tokens too small for a single thought?"
        )
    # A server may have another template than this tokenizer.
    opened = opened or sum(not THOUGHT_BEGINS.match(text.lstrip()) for text in closed) > len(texts) / 2
    answers = {id: answer_in(text, opened) for id, text in texts.items()}
    refuse_tags(answers, what, check)
    return answers


def answer_in(text: str, opened: bool) -> str:
    """Return what follows the thinking: all of a text without any, nothing if the thinking does not end."""
    answer, thought = answer_of(text)
    return "" if opened and not thought else answer  # the thinking did not end, and the judge must not see it
