"""The format check, which finds the answer in a completion, and the format reward of the paper ("Rank-Based Reward").

There are three checks. `think` demands exactly one closed `<think>...</think>` block first and a non-empty answer
after it. `none` accepts any text. Everything else is a regular expression that the whole text must match; its group
`answer` is the answer. Judge and buffer see the answer alone, never the thinking.

A rollout that was cut off while it was thinking has no closed block, so it has no answer and is never judged. A
rollout that was cut off in its answer is judged by the part that is there.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import SettingsError
from ..groups import storable


class Answer(NamedTuple):
    """The answer in a completion. `text` is empty if there is none. `well_formed` is the paper's format indicator."""

    text: str
    well_formed: bool


def read_answer(text: str, check: str = "none") -> Answer:
    """Apply a format check to a completion's text.

    A completion that breaks the format can still have an answer. Under `think`, the answer is the text after the last
    `</think>`. Under a regular expression, such a completion has no answer.
    """
    if check == "none":
        answer = text.strip()
        return Answer(answer, bool(answer))
    if check == "think":
        before, closed, answer = text.rpartition("</think>")
        once = text.count("<think>") == text.count("</think>") == 1 and before.lstrip().startswith("<think>")
        answer = answer.strip() if closed else ""
        return Answer(answer, once and bool(answer))
    match = re.fullmatch(check, text, re.DOTALL)
    if match is None:
        return Answer("", False)
    answer = (match["answer"] or "").strip()
    return Answer(answer, bool(answer))


class AnswerReader:
    """The reader that finds the answers in the arguments of a TRL reward function.

    Args:
        check (`str`, *optional*, defaults to `"none"`):
            `think`, `none` or a regular expression; see the module's docstring.
        tokenizer (*optional*):
            Decodes the completion ids into the text that the policy wrote, before TRL parses it. Default: the
            completions are read as TRL passes them.
        chat_template_kwargs (`dict`, *optional*):
            The arguments that the prompts are rendered with.

    Raises:
        [`SettingsError`]: if `check` is none of the three checks.

    Example:
        >>> AnswerReader("think").read(["Hi"], ["<think>They greet.</think>Hello!"], None)
        [Answer(text='Hello!', well_formed=True)]
    """

    def __init__(self, check: str = "none", tokenizer: Any = None, chat_template_kwargs: dict | None = None):
        check_format(check)
        self.check = check
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self._begun: str | None = None

    def read(
        self, prompts: Sequence, completions: Sequence, completion_ids: Sequence[list[int]] | None
    ) -> list[Answer]:
        """Return one [`Answer`] per completion, whose text the store and a request can hold."""
        if self.tokenizer is None or completion_ids is None:
            texts = [completion_text(completion) for completion in completions]
        else:
            texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
            if self.check == "think":
                texts = [self._begun_by_prompt(prompts[0]) + text for text in texts]
        return [read_answer(storable(text), self.check) for text in texts]

    def _begun_by_prompt(self, prompt: Any) -> str:
        """Return the thinking that the chat template puts at the end of the prompt, before the completion.

        Some templates end with `<think>`, so that completions start inside the block. With `enable_thinking: false`,
        Qwen3's template ends with a closed empty block, and the completion is the answer.
        """
        if self._begun is None:
            self._begun = ""
            if isinstance(prompt, list):
                without, rendered = (
                    self.tokenizer.apply_chat_template(
                        prompt, tokenize=False, add_generation_prompt=begin, **self.chat_template_kwargs
                    )
                    for begin in (False, True)
                )
                begin = rendered.removeprefix(without)
                self._begun = begin[begin.rindex("<think>") :] if "<think>" in begin else ""
        return self._begun


def format_reward(extracted_answer: Sequence[Answer], **kwargs) -> list[float]:
    """Return 1 for each completion that has the required format, else 0. In the paper its weight is 0.2."""
    return [float(answer.well_formed) for answer in extracted_answer]


def completion_text(completion: str | list[dict]) -> str:
    """Return the text of a completion. If TRL has split the thinking off, put it back in front."""
    if isinstance(completion, str):
        return completion
    message = completion[-1]
    reasoning = message.get("reasoning_content")
    return (f"<think>{reasoning}</think>" if reasoning else "") + (message.get("content") or "")


def check_format(check: str) -> None:
    """Refuse a format check that is neither `think`, `none` nor a regular expression with a group `answer`.

    Raises:
        [`SettingsError`]: naming the check.
    """
    if check in ("think", "none"):
        return
    known = "format_check must be 'think', 'none' or a regular expression with a group (?P<answer>...);"
    try:
        groups = re.compile(check).groupindex
    except re.error as error:
        raise SettingsError(f"{known} {check!r} is not one: {error}") from None
    if "answer" not in groups:
        raise SettingsError(f"{known} {check!r} has no such group")
