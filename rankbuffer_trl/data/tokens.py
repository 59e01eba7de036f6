"""How long a text is for a model: counted by a tokenizer, or estimated where none is given."""

import math

from ..groups import Messages

CHARACTERS_PER_TOKEN = 3  # few for English, so that an estimate is rather too high
TURN_TOKENS = 256  # of the judge's chat template, and of the turn that names the fault of an answer
QUOTED = 8  # with `judge_guard` each line of a response costs a mark more: about a token for 8


def context_for(prompt: int, verdict: int, responses: int = 0, guard: bool = True) -> int:
    """About how many tokens of context a judge's prompt needs, a repeat after one faulty answer included.

    Args:
        prompt (`int`):
            Tokens of the prompt.
        verdict (`int`):
            Tokens that an answer may have.
        responses (`int`, *optional*, defaults to `0`):
            Tokens of responses that are still to come into the prompt.
        guard (`bool`, *optional*, defaults to `True`):
            Whether these are quoted there.
    """
    return prompt + responses + (responses // QUOTED if guard else 0) + 2 * verdict + TURN_TOKENS


class TokenCounter:
    """Counts tokens.

    Args:
        tokenizer (`str`, *optional*):
            Name or path of a tokenizer. Without one, a token is taken for 3 characters, and `exact` is `False`.

    Raises:
        `ValueError`: if the tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer: str | None = None):
        self.exact = tokenizer is not None
        self.name = tokenizer or f"estimated, {CHARACTERS_PER_TOKEN} characters each"
        self._tokenizer = None
        if tokenizer is not None:
            from transformers import AutoTokenizer  # slow to import, and not needed for an estimate

            try:
                self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            except (OSError, ValueError) as error:
                cause = " ".join(str(error).split())
                raise ValueError(f"the tokenizer {tokenizer} cannot be loaded: {cause}") from error

    def text(self, text: str) -> int:
        """Tokens of a plain text."""
        if self._tokenizer is None:
            return math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def chat(self, messages: Messages) -> int:
        """Tokens of a chat in the model's template, up to the answer; without a template, those of its texts."""
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            return sum(self.text(message["content"]) for message in messages)
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.text(rendered)
