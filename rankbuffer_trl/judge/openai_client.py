"""A judge behind any OpenAI-compatible chat endpoint, such as `vllm serve`."""

import os

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAioHttpClient, OpenAIError
from openai.types import CompletionUsage

from .errors import TransportError
from .ledger import Usage


class OpenAIClient:
    """The official `openai` client, on its aiohttp transport, decoding deterministically.

    Connection faults, 408, 409, 429 and 5xx are retried by that client with backoff and jitter.

    Args:
        url (`str`):
            Base URL, such as `http://127.0.0.1:8001/v1`.
        model (`str`):
            The name under which the server serves the judge.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key. A server without keys needs none.
        max_tokens (`int`, *optional*, defaults to `256`):
            Limit on a verdict's tokens.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds for one request.
        max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        max_tokens: int = 256,
        timeout: float = 120.0,
        max_retries: int = 4,
    ):
        self.name = f"{model} at {url}"
        self.model = model
        self.max_tokens = max_tokens
        self._key = os.environ.get(api_key_env)
        self._client = AsyncOpenAI(
            base_url=url,
            api_key=self._key or "none",
            timeout=timeout,
            max_retries=max_retries,
            http_client=DefaultAioHttpClient(timeout=timeout),
        )

    async def complete(self, messages: list[dict[str, str]], *, seed: int) -> tuple[str, Usage, int]:
        """See [`ChatClient`]."""
        try:
            response = await self._client.chat.completions.with_raw_response.create(
                model=self.model, messages=messages, temperature=0, seed=seed, max_tokens=self.max_tokens
            )
        except APIStatusError as error:
            raise TransportError(f"HTTP {error.status_code}: {self._clean(error.message)}", sent(error)) from error
        except APIConnectionError as error:
            cause = error.__cause__ or error
            name = type(error).__name__
            raise TransportError(f"{name}: {self._clean(str(cause)) or type(cause).__name__}", sent(error)) from error
        attempts = 1 + response.retries_taken
        try:
            completion = response.parse()
            text = completion.choices[0].message.content
            if text is not None and not isinstance(text, str):
                raise TypeError(f"the content is a {type(text).__name__}")
            return text or "", read_usage(completion.usage), attempts
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            fault = f"not a chat completion ({type(error).__name__}: {self._clean(str(error))})"
            raise TransportError(fault, attempts) from error

    def _clean(self, message: str) -> str:
        """A server may echo the key; it must not reach a log."""
        return (message.replace(self._key, "[key]") if self._key else message)[:300]

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()


def sent(error: APIStatusError | APIConnectionError) -> int:
    """How many requests were sent until `error`."""
    return 1 + int(error.request.headers.get("x-stainless-retry-count", 0))


def read_usage(usage: CompletionUsage | None) -> Usage:
    """Token counts of an answer; a server that reports none counts as zero."""
    details = getattr(usage, "prompt_tokens_details", None)
    counts = (
        getattr(usage, "prompt_tokens", 0),
        getattr(details, "cached_tokens", 0),
        getattr(usage, "completion_tokens", 0),
    )
    return Usage(*(int(count or 0) for count in counts))
