"""A judge behind any OpenAI-compatible chat endpoint, such as `vllm serve`."""

import os

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAioHttpClient, OpenAIError

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
        self.max_retries = max_retries
        self._client = AsyncOpenAI(
            base_url=url,
            api_key=os.environ.get(api_key_env) or "none",
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
            completion = response.parse()
            text = completion.choices[0].message.content or ""
        except APIStatusError as error:
            retried = error.status_code in (408, 409, 429) or error.status_code >= 500
            raise TransportError(f"HTTP {error.status_code}: {error.message[:300]}", self._sent(retried)) from error
        except APIConnectionError as error:
            cause = error.__cause__ or error
            raise TransportError(
                f"{type(error).__name__}: {cause or type(cause).__name__}", self._sent(True)
            ) from error
        except (OpenAIError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise TransportError(f"not a chat completion ({type(error).__name__}: {str(error)[:200]})") from error
        usage = completion.usage
        details = getattr(usage, "prompt_tokens_details", None)
        tokens = Usage(
            getattr(usage, "prompt_tokens", 0) or 0,
            getattr(details, "cached_tokens", 0) or 0,
            getattr(usage, "completion_tokens", 0) or 0,
        )
        return text, tokens, 1 + response.retries_taken

    def _sent(self, retried: bool) -> int:
        return 1 + self.max_retries if retried else 1

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()
