"""Count the tokens of a text with a tokenizer, or estimate them without one."""

import math
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from rankbuffer_trl.data.queries import DataError
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Messages

from ..jobs.reach import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer by its name or path.

    Raises:
        [`SettingsError`]: if it cannot be loaded.
    """
    from transformers import AutoTokenizer  # slow to import, and not needed for an estimate

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise SettingsError(f"the tokenizer {name} cannot be loaded: {cause}") from error


def render(tokenizer: "PreTrainedTokenizerBase", name: str, messages: Messages, **kwargs: Any) -> str:
    """Write a chat in a model's template, up to the answer. `kwargs` are those of the template.

    Raises:
        [`DataError`]: if the template refuses the roles of the messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the template of {name} refuses a prompt of the roles {roles}: {error}") from error


class TokenCounter:
    """A counter of tokens.

    Args:
        tokenizer (`str`, *optional*):
            Name or path of a tokenizer. Without one, 3 characters count as a token.

    Attributes:
        exact (`bool`):
            Whether there is a tokenizer, so that tokens are counted and not estimated.

    Raises:
        [`SettingsError`]: if the tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer: str | None = None):
        self.name = tokenizer or f"estimated, {CHARACTERS_PER_TOKEN} characters each"
        self.exact = tokenizer is not None
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    def text(self, text: str) -> int:
        """Count the tokens of a plain text."""
        if self._tokenizer is None:
            return math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chat(self, messages: Messages) -> int:
        """Count the tokens of a chat in the model's template, up to the answer; without a template, of its texts.

        Raises:
            [`DataError`]: as [`render`].
        """
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return sum(self.text(message["content"]) for message in messages)
        return self.text(render(self._tokenizer, self.name, messages))
