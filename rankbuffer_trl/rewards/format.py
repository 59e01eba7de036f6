"""What counts as an answer: the format check, and the format reward of the paper (section "Rank-Based Reward").

Three checks: `think` wants exactly one closed `<think>...</think>` block first and a non-empty answer after it; `none`
wants any text; everything else is a regular expression that the whole text must match, whose group `answer`, if it has
one, is the answer. Judge and buffer see the answer alone, never the thinking.

A rollout that was cut off while it thought has no closed block, so no answer, and is never judged. One that was cut
off in its answer is judged by what is there.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a completion says. `text` is empty if it holds no answer; `well_formed` is the paper's format indicator."""

    text: str
    well_formed: bool


def read_answer(text: str, check: str = "none") -> Answer:
    """Apply a format check to a completion's text.

    A completion that breaks the format can still hold an answer: under `think`, what follows the last `</think>`;
    under a regular expression, nothing.
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
    answer = ((match["answer"] or "") if "answer" in match.groupdict() else match.group()).strip()
    return Answer(answer, bool(answer))


class AnswerReader:
    """Reads the answers out of what TRL hands to a reward function.

    Args:
        check (`str`, *optional*, defaults to `"none"`):
            `think`, `none` or a regular expression; see the module's docstring.
        tokenizer (*optional*):
            Decodes the completion ids, so that the text is what the policy wrote, whatever TRL made of it. Without it
            the completions are taken as they come.
        chat_template_kwargs (`dict`, *optional*):
            What the prompts are rendered with.
    """

    def __init__(self, check: str = "none", tokenizer: Any = None, chat_template_kwargs: dict | None = None):
        self.check = check
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self._begun: str | None = None

    def read(
        self, prompts: Sequence, completions: Sequence, completion_ids: Sequence[list[int]] | None
    ) -> list[Answer]:
        """One [`Answer`] per completion."""
        if self.tokenizer is None or completion_ids is None:
            texts = [completion_text(completion) for completion in completions]
        else:
            texts = self.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
            if self.check == "think":
                texts = [self._begun_by_prompt(prompts[0]) + text for text in texts]
        return [read_answer(text, self.check) for text in texts]

    def _begun_by_prompt(self, prompt: Any) -> str:
        """The thinking with which the chat template begins each completion, inside the prompt.

        Some templates end with `<think>`, so completions start inside the block; with `enable_thinking: false`,
        Qwen3's ends with a closed empty one, and the completion is the answer.
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


class FormatReward:
    """1 if the completion has the required format, else 0. A reward function with weight 0.2 in the paper."""

    __name__ = "format_reward"

    def __init__(self, reader: AnswerReader):
        self.reader = reader

    def __call__(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[list[int]] | None = None,
        **kwargs,
    ) -> list[float]:
        """Rewards in {0, 1}, one per completion."""
        return [float(answer.well_formed) for answer in self.reader.read(prompts, completions, completion_ids)]


def completion_text(completion: str | list[dict]) -> str:
    """The text of a completion, its thinking put back where TRL had split it off."""
    if isinstance(completion, str):
        return completion
    message = completion[-1]
    reasoning = message.get("reasoning_content")
    return (f"<think>{reasoning}</think>" if reasoning else "") + (message.get("content") or "")


def check_format(check: str) -> None:
    """Refuse a format check that is neither `think`, `none` nor a regular expression.

    Raises:
        `ValueError`: naming it.
    """
    if check in ("think", "none"):
        return
    try:
        re.compile(check)
    except re.error as error:
        raise ValueError(
            f"format_check must be 'think', 'none' or a regular expression; {check!r} is not one: {error}"
        ) from None
