"""One server behind an OpenAI-compatible chat endpoint, such as `vllm serve`."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

from httpx2 import Limits  # what openai is built on
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAioHttpClient, OpenAIError

from .errors import TransportError
from .judge import Asked
from .ledger import Tally, Usage
from .verdicts import Verdict, max_tokens

IDLE_SECONDS = 3.0
PING = [{"role": "user", "content": "ping"}]


class OpenAIClient:
    """The official `openai` client, on its aiohttp transport, decoding deterministically.

    Connection faults, 408, 409, 429 and 5xx are retried by that client with backoff and jitter, or when the server's
    `Retry-After` says.

    Args:
        url (`str`):
            Base URL, such as `http://127.0.0.1:8001/v1`.
        model (`str`):
            The name under which the server serves the judge.
        api_key_env (`str`, *optional*, defaults to `"OPENAI_API_KEY"`):
            Environment variable that holds the key. A server without keys needs none.
        decoding (`str`, *optional*, defaults to `"none"`):
            How verdicts are imposed: `regex` (vLLM's structured outputs), `json_schema` (the standard
            `response_format`) or `none`.
        free_tokens (`int`, *optional*, defaults to `256`):
            Tokens an answer may have beside its verdict, where decoding leaves room for any: prose, a code fence,
            thinking.
        request (`Mapping`, *optional*):
            Fields to set in every request; `None` leaves a field out.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that a request may go without a byte from the server.
        max_retries (`int`, *optional*, defaults to `4`):
            Transport retries of one request.
        concurrency (`int`, *optional*, defaults to `64`):
            Requests in flight at once.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        decoding: str = "none",
        free_tokens: int = 256,
        request: Mapping[str, Any] | None = None,
        timeout: float = 120.0,
        max_retries: int = 4,
        concurrency: int = 64,
    ):
        self.name = f"{model} at {url}"
        self.url = url
        self.model = model
        self.decoding = decoding
        self.free_tokens = free_tokens
        self.request = dict(request or {})
        self.max_retries = max_retries
        self.concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self.api_key_env = api_key_env
        self._key = os.environ.get(api_key_env)
        self._client = AsyncOpenAI(
            base_url=url,
            api_key=self._key or "none",
            timeout=timeout,
            max_retries=max_retries,
            # vLLM's HTTP server drops connections that were idle for 5 s; a request sent just then would be lost.
            http_client=DefaultAioHttpClient(timeout=timeout, limits=Limits(keepalive_expiry=IDLE_SECONDS)),
        )
        self._hasty = self._client.with_options(max_retries=0)

    async def complete(
        self, messages: list[dict[str, str]], *, question: Asked, seed: int, tally: Tally, retry: bool = True
    ) -> tuple[str, Usage]:
        """See [`ChatClient`]. With `retry=False` the first fault is final."""
        client = self._client if retry else self._hasty
        fields = {"temperature": 0, "seed": 0} | question.fields(self.decoding, self.free_tokens)
        if fields["seed"] is not None:
            fields["seed"] += seed
        body = self._body(messages=messages, **fields)
        async with self._slots:
            started = time.perf_counter()
            tally.server = self.url
            tally.attempts += 1
            try:
                # extra_body and the raw response save a third of the client's CPU time: it would copy each message
                # field by field and build its own objects of the answer.
                response = await client.chat.completions.with_raw_response.create(
                    model=self.model, messages=[], extra_body=body
                )
            except APIStatusError as error:
                tally.attempts += retries(error)
                raise self._status_fault(error) from None
            except APIConnectionError as error:
                tally.attempts += retries(error)
                raise TransportError(self._connection_fault(error), "down") from error
            finally:
                tally.seconds += time.perf_counter() - started
        tally.attempts += response.retries_taken
        try:
            completion = response.http_response.json()
            text = completion["choices"][0]["message"].get("content")
            if text is not None and not isinstance(text, str):
                raise TypeError(f"the content is a {type(text).__name__}")
            return text or "", read_usage(completion.get("usage"))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            fault = f"not a chat completion ({type(error).__name__}: {self._clean(str(error))})"
            raise TransportError(fault) from error

    async def models(self) -> dict[str, int | None]:
        """The models that the server lists, each with its context length in tokens where it says so (vLLM does).

        Raises:
            [`TransportError`]: if it cannot be reached or lists none.
        """
        try:
            page = await self._client.models.list()
            return {model.id: getattr(model, "max_model_len", None) for model in page.data}
        except APIConnectionError as error:
            raise TransportError(self._connection_fault(error), "down") from error
        except APIStatusError as error:
            raise self._status_fault(error) from None
        except (OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise TransportError(f"not a list of models ({self._clean(str(error))})") from error

    async def count_tokens(self, prompt: str) -> int | None:
        """Tokens of a prompt in the server's chat template, or `None` where it cannot count (only vLLM can)."""
        root = self.url.rstrip("/").removesuffix("/v1")
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        try:
            answer: Any = await self._hasty.post(f"{root}/tokenize", body=body, cast_to=object)
            return int(answer["count"])
        except (OpenAIError, ValueError, TypeError, LookupError):
            return None

    async def alive(self) -> bool:
        """Whether the server generates one token for the model within 10 seconds."""
        try:
            response = await self._hasty.chat.completions.with_raw_response.create(
                model=self.model, messages=[], extra_body=self._body(messages=PING, max_tokens=1), timeout=10
            )
            return bool(response.http_response.json()["choices"])
        except (OpenAIError, ValueError, TypeError, LookupError):
            return False

    def room(self, verdict: Verdict) -> int:
        """Tokens that an answer may have."""
        return max_tokens(verdict, self.decoding, self.free_tokens)

    def _body(self, **fields: Any) -> dict[str, Any]:
        """A request's fields, those that the user sets among them."""
        return {name: value for name, value in (fields | self.request).items() if value is not None}

    def _status_fault(self, error: APIStatusError) -> TransportError:
        status = error.status_code
        message = error.message.removeprefix(f"Error code: {status} - ")
        return TransportError(f"HTTP {status}: {self._clean(message)}", kind_of(status), status)

    def _connection_fault(self, error: APIConnectionError) -> str:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outer ones call every failed connection a timeout
            cause = cause.__cause__
        return f"{type(cause).__name__}: {self._clean(str(cause)) or 'no connection, or no answer in time'}"

    def _clean(self, message: str) -> str:
        """A server may echo the key; it must not reach a log."""
        return (message.replace(self._key, "[key]") if self._key else message)[:300]

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()


def kind_of(status: int) -> str:
    """Which kind of [`TransportError`] an HTTP status is."""
    if status in (502, 503, 504):
        return "down"
    return "busy" if status in (408, 409, 429) or status >= 500 else "refused"


def retries(error: APIStatusError | APIConnectionError) -> int:
    """How often the request was sent again until `error`."""
    return int(error.request.headers.get("x-stainless-retry-count", 0))


def read_usage(usage: dict | None) -> Usage:
    """Token counts of an answer; what a server does not report counts as zero."""
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    counts = usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens")
    return Usage(*(int(count or 0) for count in counts))
