"""Check that a policy reads the prompt that its judge reads, before anything is paid for.

A judge reads role and content of every message. A policy reads what its chat template writes, and many templates leave
out a message whose role they do not know, or a second system message. The rollouts would then break rules that the
policy was never given.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from ..groups import Messages
from ._queries import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLOSED = "</think>"  # many templates drop what is before it in the turns of the assistant


def render_messages(tokenizer: "PreTrainedTokenizerBase", place: str, messages: Messages, **kwargs: Any) -> str:
    """Write a chat in a model's template, up to the answer. `kwargs` are those of the template."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"{place}: the chat template refuses a prompt of the roles {roles}: {error}") from error


def check_prompts(
    rows: Iterable[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", limit: int | None = None, **kwargs: Any
) -> None:
    """Refuse a prompt that the policy would read otherwise than the judge, or that has too many tokens.

    Args:
        rows (`Iterable[Mapping]`):
            Rows with `prompt`, `query_id` and their `place` in the data set.
        tokenizer (`PreTrainedTokenizerBase`):
            The tokenizer of the policy. Without a chat template nothing is checked.
        limit (`int`, *optional*):
            The largest number of tokens of a prompt.

    Raises:
        [`DataError`]: naming the row, and the role or the number of tokens.
    """
    seen = set()
    for row in rows if tokenizer.chat_template else ():
        prompt, place = row["prompt"], f"{row['place']} (query_id {row['query_id']!r})"
        if (pattern := pattern_of(prompt)) not in seen:  # a template treats all prompts of a pattern alike
            seen.add(pattern)
            check_pattern(tokenizer, place, prompt, **kwargs)
        if limit:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **kwargs)
            if len(ids) > limit:
                raise DataError(f"{place}: its prompt has {len(ids)} tokens, max_prompt_length is {limit}")


def unstopped_turn(
    tokenizer: "PreTrainedTokenizerBase", prompt: Messages, stops: Iterable[int], **kwargs: Any
) -> tuple[str, int] | None:
    """Return the token by which the template ends an answer, with its id, if neither it nor a later one is in `stops`.

    `None` also if the template ends an answer by no token of its own, or does not write one.
    """
    mark = "qz0a"
    try:
        written = tokenizer.apply_chat_template(
            [*prompt, {"role": "assistant", "content": mark}], tokenize=False, **kwargs
        )
        _, found, after = written.rpartition(mark)
        ids = tokenizer.encode(after, add_special_tokens=False) if found else []
        marks = [id for id in ids if id in tokenizer.added_tokens_decoder]
    except (TemplateError, TypeError, ValueError, NotImplementedError):
        return None
    return (tokenizer.decode(marks[:1]), marks[0]) if marks and not {*marks} & {*stops} else None


def pattern_of(prompt: Messages) -> tuple:
    """Return what a template may decide by."""
    return tuple(
        # Each message's role, thoughts and further keys.
        (message["role"], CLOSED in message["content"], *((key, value is None) for key, value in message.items()))
        for message in prompt
    )


def check_pattern(tokenizer: "PreTrainedTokenizerBase", place: str, prompt: Messages, **kwargs: Any) -> None:
    """Refuse a prompt if the template leaves out a part of a message, or writes more of it than role and content."""
    # Marks in place of the texts: what the template writes can be found in its output.
    marks = [[f"qz{i}a", f"qz{i}b"][: 1 + (CLOSED in each["content"])] for i, each in enumerate(prompt)]
    whole: list[dict[str, Any]] = [
        {**each, "content": f"\n{CLOSED}\n\n".join(mark)} for each, mark in zip(prompt, marks, strict=True)
    ]
    if marks[-1][-1] not in render_messages(tokenizer, place, whole, **kwargs):
        # Templates of some vision models read parts alone, and TRL makes parts of texts for them.
        whole = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in whole]
    read = [{"role": each["role"], "content": each["content"]} for each in whole]
    written = render_messages(tokenizer, place, whole, **kwargs)
    for each, mark in zip(prompt, marks, strict=True):
        if missing := [part for part in mark if part not in written]:
            what = "the thoughts in a message" if missing == [mark[0]] and mark[1:] else "a message"
            raise DataError(
                f"{place}: the policy would not read what the judge reads: its chat template leaves out {what} of the"
                f" role {each['role']!r}. Use roles that the template knows, or write the text into the user's message"
            )
    if whole != read and written != render_messages(tokenizer, place, read, **kwargs):
        keys = ", ".join(sorted({key for each in prompt for key in each} - {"role", "content"}))
        raise DataError(
            f"{place}: the judge would not read what the policy reads: the chat template writes more of a message than"
            f" its role and content. Write it into the content, and leave out {keys}"
        )
