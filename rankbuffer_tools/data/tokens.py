"""Count the tokens of a text with a tokenizer, or estimate them without one."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbuffer_trl.data import check_prompts, render_messages
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.groups import Messages

from ..batch.engines import check_model
from ..batch.server_check import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name: str, revision: str | None = None, local: bool = False) -> "PreTrainedTokenizerBase":
    """Load a tokenizer by its name or path; with `local`, without the network. Else raise [`SettingsError`]."""
    if not local or Path(name).is_dir():
        check_model(name, revision)
    from transformers import AutoTokenizer  # slow to import, and not needed for an estimate

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=local)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise SettingsError(f"the tokenizer {name} cannot be loaded: {cause}") from error


class TokenCounter:
    """A counter of tokens. Without a `tokenizer`, by name or path, 3 characters count as one.

    Raises:
        [`SettingsError`]: if the tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer: str | None = None):
        self.name = tokenizer or f"estimated, {CHARACTERS_PER_TOKEN} characters each"
        self.exact = tokenizer is not None  # counted, not estimated
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)

    def text(self, text: str) -> int:
        """Count the tokens of a plain text."""
        if self._tokenizer is None:
            return math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        # No warning of long texts: they are only counted.
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chat(self, messages: Messages) -> int:
        """Count the tokens of a chat in the model's template, up to the answer; without a template, of its texts."""
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return sum(self.text(message["content"]) for message in messages)
        return self.text(render_messages(self._tokenizer, self.name, messages))

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Refuse a prompt that the tokenizer's policy reads otherwise than a judge, see [`check_prompts`]."""
        if self._tokenizer is not None:
            check_prompts(rows, self._tokenizer)
