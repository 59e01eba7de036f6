"""The format check, which finds the answer in a completion, and the format reward of the paper ("Rank-Based Reward").

There are three checks. `think` demands exactly one closed `<think>...</think>` block first and a non-empty answer
after it. `none` accepts any text. Everything else is a regular expression that the whole text must match; its group
`answer` is the answer. Judge and buffer see the answer alone, never the thinking.

A rollout that was cut off while it was thinking has no closed block, so it has no answer and is never judged. A
rollout that was cut off in its answer is judged by the part that is there.

A rollout of several turns, between which tools were called, is well formed if every turn of the policy is.
"""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ._transcripts import from_policy, view_of
from .errors import SettingsError
from .groups import storable


class Answer(NamedTuple):
    """The answer in a completion. `text` is empty if there is none. `well_formed` is the paper's format indicator."""

    text: str
    well_formed: bool


def read_answer(text: str, check: str = "none") -> Answer:
    """Apply a format check to a completion's text. A completion that breaks the format can still have an answer."""
    if check == "none":
        answer = text.strip()
        return Answer(answer, bool(answer))
    if check == "think":
        before, closed, answer = text.rpartition("</think>")  # the last one: a thought may name the tag
        once = text.count("<think>") == text.count("</think>") == 1 and before.lstrip().startswith("<think>")
        answer = answer.strip() if closed else ""
        return Answer(answer, once and bool(answer))
    match = re.fullmatch(check, text, re.DOTALL)
    if match is None:
        return Answer("", False)  # nothing says where its answer is
    answer = (match["answer"] or "").strip()
    return Answer(answer, bool(answer))


def read_turn(message: dict, text: str, check: str) -> Answer:
    """Apply a format check to one turn of the policy, whose whole text is `text`. The answer is without its calls."""
    if not message.get("tool_calls"):
        return read_answer(text, check)
    thinks = check == "think"  # this block must be closed in each turn; a regular expression is for answers
    whole = read_answer(text, check if thinks else "none")
    beside = storable(completion_text([message]))
    answer = read_answer(beside.rpartition("</think>")[2]) if thinks else read_answer(beside, check)
    return Answer(answer.text if whole.text else "", whole.well_formed)


class AnswerExtractor:
    """The extractor that finds the answers in the arguments of a TRL reward function.

    Args:
        check (`str`, *optional*, defaults to `"none"`):
            `think`, `none` or a regular expression; see the module's docstring.
        tokenizer (*optional*):
            Decodes the completion ids. Default: the completions are read as TRL passes them.
        chat_template_kwargs (`dict`, *optional*):
            The arguments that the prompts are rendered with.
        view (`str`, *optional*, defaults to `"answer"`):
            What the judge sees of a rollout with tools, see [`view_of`]. `None` is for rollouts without tools.
        limit (`int`, *optional*, defaults to `1000`):
            Characters of each result of a tool that a transcript shows.

    Example:
        >>> AnswerExtractor("think").read(["Hi"], ["<think>They greet.</think>Hello!"], None)
        [Answer(text='Hello!', well_formed=True)]
    """

    def __init__(
        self,
        check: str = "none",
        tokenizer: Any = None,
        chat_template_kwargs: dict | None = None,
        view: str | None = "answer",
        limit: int = 1000,
    ):
        check_format(check)
        self.check = check
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}
        self.view = view
        self.limit = limit
        self._begun: str | None = None
        self._decoded: dict[tuple[int, ...], str] = {}  # what arrived while the rest of the generation goes on

    def takes_thoughts(self, prompt: Any) -> bool:
        """Tell whether the chat template lets a policy think, and its thoughts would count as a part of its answer."""
        template = getattr(self.tokenizer, "chat_template", None)
        if self.check != "none" or not template:
            return False
        if begun := self._begun_by_prompt(prompt):
            return begun.rstrip().endswith("<think>")  # else the template has closed the block, too
        return "enable_thinking" in str(template) and self.chat_template_kwargs.get("enable_thinking", True)

    def read(
        self,
        prompts: Sequence,
        completions: Sequence,
        completion_ids: Sequence[list[int]] | None,
        masks: Sequence[list[int]] | None = None,
    ) -> list[Answer]:
        """Return one [`Answer`] per completion.

        `masks` has 1 for each token that the policy wrote, and 0 for those of tools.

        Raises:
            [`SettingsError`]: if a transcript is wanted of a completion that has no messages.
        """
        unknown: list[None] = [None] * len(completions)
        rollouts = zip(prompts, completions, completion_ids or unknown, masks or unknown, strict=True)
        return [self._read(*rollout) for rollout in rollouts]

    def _read(
        self, prompt: Any, completion: str | list[dict], ids: list[int] | None, mask: list[int] | None
    ) -> Answer:
        if self.view == "transcript" and isinstance(completion, str):
            raise SettingsError("judge_view='transcript' needs prompts that are lists of messages, not plain texts")
        whole = self.view is None or isinstance(completion, str)
        messages: Any = [{"content": completion_text(completion)}] if whole else completion
        own = [message for message in messages if from_policy(message)]
        # What the policy wrote, if it is known: TRL's parser drops a second block of thinking.
        if self.tokenizer is None or ids is None or (mask is None and len(messages) > 1):
            texts = [completion_text([message]) + ("(call)" if message.get("tool_calls") else "") for message in own]
        else:
            parts = [ids] if mask is None else policy_turns(ids, mask)
            begun = self._begun_by_prompt(prompt) if self.check == "think" else ""
            texts = [begun + text for text in self._decode(parts)]
        turns = [read_turn(message, storable(text), self.check) for message, text in zip(own, texts, strict=True)]
        text = storable(view_of(self.view or "answer", messages, [turn.text for turn in turns], self.limit))
        return Answer(text, bool(text) and all(turn.well_formed for turn in turns))

    def _decode(self, parts: list[list[int]]) -> list[str]:
        keys = [tuple(part) for part in parts]
        if new := [key for key in keys if key not in self._decoded]:
            # `read` sees each text twice: when it arrives, and in its group.
            self._decoded |= zip(new, self.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True)
        return [self._decoded[key] for key in keys]

    def forget(self) -> None:
        """Forget the texts of a generation."""
        self._decoded.clear()

    def _begun_by_prompt(self, prompt: Any) -> str:
        """Return the thinking that the chat template puts at the end of the prompt, before the completion."""
        # Some templates end with `<think>`, so that completions start inside the block. With `enable_thinking: false`,
        # Qwen3's template ends with a closed empty block, and the completion is the answer.
        if self._begun is None:  # once: it is the same for all prompts
            self._begun = ""
            if isinstance(prompt, list):
                without, rendered = (
                    self.tokenizer.apply_chat_template(
                        prompt, tokenize=False, add_generation_prompt=begin, **self.chat_template_kwargs
                    )
                    for begin in (False, True)
                )
                start = rendered.rfind("<think>")
                # A prompt may name the tag, and some templates end a chat without an answer in another way.
                if start >= 0 and not without.startswith(rendered[: start + len("<think>")]):
                    self._begun = rendered[start:]
        return self._begun


def policy_turns(ids: Sequence[int], mask: Sequence[int]) -> list[list[int]]:
    """Cut the token ids of a rollout into the turns of the policy."""
    runs = groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    # The mask has 0 for tokens of tools, which stand between turns.
    return [[id for _, id in run] for own, run in runs if own]


def format_reward(extracted_answer: Sequence[Answer], **kwargs) -> list[float]:
    """Return 1 for each completion that has the required format, else 0. In the paper its weight is 0.2."""
    return [float(answer.well_formed) for answer in extracted_answer]


def completion_text(completion: str | list[dict]) -> str:
    """Return the text that the policy wrote last."""
    if isinstance(completion, str):
        return completion
    message = next(message for message in reversed(completion) if from_policy(message))
    reasoning = message.get("reasoning_content")
    # TRL may have split the thinking off, which the format check looks for.
    return (f"<think>{reasoning}</think>" if reasoning else "") + (message.get("content") or "")


def check_format(check: str) -> None:
    """Refuse a format check that is neither `think`, `none` nor a regular expression with a group `answer`."""
    if check in ("think", "none"):
        return
    rule = "format_check must be 'think', 'none' or a regular expression with a group (?P<answer>...);"
    try:
        groups = re.compile(check).groupindex
    except re.error as error:
        raise SettingsError(f"{rule} {check!r} is not one: {error}") from None
    if "answer" not in groups:
        raise SettingsError(f"{rule} {check!r} has no such group")
