"""One server behind an OpenAI-compatible chat endpoint, such as `vllm serve`."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAioHttpClient, OpenAIError

from ._completion import FLAGGED, FREE_FORM, WITHHELD, fault_in_content, read_completion, words_of
from ._endpoint import Endpoint, read_key
from ._errors import ECHOED, TransportError, masked, printable
from ._http import Limits, ReadTimeout, Request, Response
from ._judge import TOO_FEW_SAMPLES, Askable
from ._ledger import Reply, Tally
from ._turns import Turns

logger = logging.getLogger(__name__)

IDLE_SECONDS = 3.0  # vLLM's HTTP server drops connections that were idle for 5 s; a request sent just then is lost
PROBE_SECONDS = 10.0
PENALTY_SECONDS = 5.0  # for a list of models that a run can do without
LOOK_SECONDS = 60.0  # for a list of models or a count of tokens; a sampler's `timeout` may be an hour
TOTAL_TIMEOUTS = 5  # times `timeout` that a request may take in all; some servers send blanks while a question waits
MOST_BYTES = 16 * 2**20  # of one answer, decompressed: a million tokens of text with room to spare
MOST_WORDS = 300  # characters of a server's own words in an error
ENCODINGS = ("identity", "gzip", "deflate")  # a piece of 16 kB of these expands to 16 MB at most; of others to more
CHAT = "/chat/completions"
GONE = (502, 503, 504, *range(520, 525), 527, 529, 530)  # those above 504 are Cloudflare's, and 529 is Anthropic's
PASSING = (425, 499)  # sent too early, and a connection that the gateway closed
SLOW = (408, 504, 524)  # what gateways answer when the server behind them is too slow
NO_CREDIT = re.compile(  # in the fields for programs; in words, Gemini says "quota" and "billing" of a limit a minute
    rb'"(code|type|error_type|status)"\s*:\s*"(insufficient_(quota|balance|funds|credits)|billing_hard_limit_reached'
    rb'|billing_not_active|exceeded_current_quota_error|Arrearage)"|"message"\s*:\s*"Key limit exceeded',
    re.I,
)
IMPOSING = {"structured_outputs", "response_format"}  # the fields of a request that impose a form on its answer
OPENAI = "api.openai.com"
PING = [{"role": "user", "content": "ping"}]
NEUTRAL = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"top_k": -1, "top_p": 1.0, "min_p": 0.0},
}
"""What vLLM and SGLang would otherwise take from the model's `generation_config.json`; a penalty changes verdicts."""
VLLM: dict[str, bool] = {}
"""Whether an address is one of them, by its list of models; others may refuse these fields."""
OTHERS: set[tuple[str, str]] = set()  # the other models of this process that were named, each with its address
MOST_OTHERS = 8
PROVIDERS: dict[str, str] = {}
"""The provider that a router named first, by the router's address; empty once another was said."""
VARIANT = r"([-_.@]?(v?\d[\d.-]*|latest|preview|gguf)|:.*)*"  # what names of one model may end with
LOCAL = ("localhost", "127.0.0.1", "::1")
DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""No proxy of the environment knows the loopback of this machine."""


class OpenAIClient:
    """The official `openai` client, on its aiohttp transport, decoding deterministically.

    Connection faults, 408, 409, 429 and 5xx are retried by that client with backoff and jitter, or when the server's
    `Retry-After` says.

    Args:
        url (`str`):
            Base URL, such as `http://127.0.0.1:8001/v1`.
        model (`str`):
            The name under which the server serves the judge.
        decoding (`str`, *optional*, defaults to `"none"`):
            How verdicts are imposed: `regex` (vLLM's structured outputs), `json_schema` (the standard
            `response_format`) or `none`.
        free_tokens (`int`, *optional*, defaults to `256`):
            Tokens that an answer may have in addition to its verdict, for prose, a code fence or thinking. No effect
            for `regex`.
        endpoint (`Endpoint`, *optional*):
            The settings of the connection: key, request fields, limits, role. Default: [`Endpoint`] with `settings`.
        samples (`int`, *optional*, defaults to `1`):
            Number of answers at temperature 1 to ask for in place of log probabilities, if it is above 1.
        settings:
            Arguments of [`Endpoint`], if `endpoint` is not given, such as `timeout`.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        decoding: str = "none",
        free_tokens: int = 256,
        endpoint: Endpoint | None = None,
        samples: int = 1,
        **settings: Any,
    ):
        self.endpoint = replace(endpoint or Endpoint(**settings), urls=(url,), model=model)
        self.role = self.endpoint.role
        self.name = f"{model} at {url}"
        self.url = url
        self.server = urlsplit(url).netloc  # without a path, which may hold what nobody should see
        self.model = model
        self.decoding = decoding
        self.free_tokens = free_tokens
        self.samples = samples
        self.turns = Turns(self.endpoint.concurrency, f"the {self.role} server {url}")
        self._key = read_key(self.endpoint.api_key_env, f"{self.role}_api_key_env")
        headers = dict(self.endpoint.headers)
        client = AsyncOpenAI(
            base_url=url,
            api_key=self._key or "none",  # the client refuses to be made without one
            timeout=self.endpoint.timeout,
            max_retries=self.endpoint.max_retries,
            http_client=BoundedClient(self.endpoint.timeout, self.turns),
        )
        self._client = with_headers(client, headers)
        self._hasty = with_headers(client.with_options(max_retries=0), headers)  # the same connections, no retries
        self._finding: asyncio.Task | None = None

    async def complete(
        self, messages: Sequence[dict[str, str]], *, question: Askable, seed: int, tally: Tally, retry: bool = True
    ) -> Reply:
        """Answer as [`ChatClient`] says. With `retry=False` the first fault is final."""
        client = self._client if retry else self._hasty
        neutral = NEUTRAL if VLLM.get(self.url) and self.role == "judge" else {}
        fields = {"temperature": 0, "seed": 0} | neutral | self._question_fields(question)
        if fields["seed"] is not None:
            fields["seed"] += seed  # a repeat must be able to answer differently
        async with self.turns:
            body = self._body(messages=list(messages), **fields)
            started = time.perf_counter()
            tally.server = self.server
            tally.attempts += 1
            try:
                # `chat.completions.create` needs much more CPU time: it looks at the request field by field and builds
                # its own objects of the answer.
                response = await client.post(CHAT, body=body, cast_to=Response)
            except (APIStatusError, APIConnectionError, UnreadableAnswer) as error:
                tally.attempts += retries(error)
                raise self._fault(error) from None
            finally:
                tally.seconds += time.perf_counter() - started
        tally.attempts += retries(response)
        try:
            answer = response.json()
            reply = read_completion(answer, body.get("max_tokens") or body.get("max_completion_tokens"))
            self._name_model(answer.get("model"))
            self._name_provider(answer.get("provider"))
            if len(reply.samples) < fields.get("n", 0):
                raise self._error(f"it gives {TOO_FEW_SAMPLES}={self.samples}; not every server can")
            note = reply.note
            if body.keys() & IMPOSING and reply.text.strip() and not reply.text.lstrip().startswith("{"):
                note = note or FREE_FORM
            return reply._replace(
                text=self._without_key(reply.text),
                samples=tuple(sample._replace(text=self._without_key(sample.text)) for sample in reply.samples),
                note=self._without_key(note[:MOST_WORDS]),
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            begins, cause = response.content.lstrip(), f"({type(error).__name__}: {str(error)[:MOST_WORDS]})"
            if begins.startswith((b"data:", b"event:", b":")):
                cause = "because it streams its answer, which was not asked for: name a server that does not"
            elif begins.startswith(b"<"):
                cause = f"but a web page: does {self.role}_url name the interface, such as .../v1?"
            raise self._error(f"not a chat completion {cause}") from error

    async def models(self, client: AsyncOpenAI | None = None) -> dict[str, int | None]:
        """Return the models that the server lists, each with its context length in tokens if the server says it.

        Raises:
            [`TransportError`]: if it cannot be reached, lists none, or is too slow.
        """
        seconds = min(LOOK_SECONDS, self.endpoint.timeout)
        try:
            async with asyncio.timeout(seconds):
                page = await (client or self._client).models.list()
            VLLM[self.url] = any(getattr(model, "owned_by", None) in ("vllm", "sglang") for model in page.data)
            return {self._without_key(model.id): context_of(model) for model in page.data}
        except TimeoutError:
            raise self._error(f"no list of models within {seconds:g} s", "down") from None
        except (APIStatusError, APIConnectionError, UnreadableAnswer) as error:
            raise self._fault(error) from None
        except (OpenAIError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise self._error(f"not a list of models ({str(error)[:MOST_WORDS]})") from error

    async def find_penalties(self) -> None:
        """Ask a judge's server once whether it is vLLM, which else answers under the penalties of the model's file."""
        if self.role == "judge" and self.url not in VLLM:
            VLLM[self.url] = False  # if it gives no list, until it comes back from an outage
            self._finding = asyncio.create_task(self._find_penalties())
        if self._finding and not self._finding.done():  # all questions of a first step wait for one look
            await asyncio.shield(self._finding)

    def forget_penalties(self) -> None:
        """Look again before the next question: a server that is back may be another one."""
        VLLM.pop(self.url, None)

    async def _find_penalties(self) -> None:
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(PENALTY_SECONDS):
                await self.models(self._hasty)

    async def count_tokens(self, prompt: str) -> int | None:
        """Count the tokens of a prompt in the server's chat template; `None` if it cannot (vLLM and llama.cpp can)."""
        root = self.url.rstrip("/").removesuffix("/v1")
        body = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        try:
            async with asyncio.timeout(min(LOOK_SECONDS, self.endpoint.timeout)):
                answer: Any = await self._hasty.post(f"{root}/tokenize", body=body, cast_to=object)
                if "count" not in answer:  # of llama.cpp, which counts a text
                    filled: Any = await self._hasty.post(f"{root}/apply-template", body=body, cast_to=object)
                    text = {"content": filled["prompt"], "parse_special": True}
                    answer = await self._hasty.post(f"{root}/tokenize", body=text, cast_to=object)
            return int(answer["count"]) if "count" in answer else len(answer["tokens"])
        except (OpenAIError, ValueError, TypeError, LookupError, OverflowError, RecursionError, TimeoutError):
            return None

    async def alive(self) -> bool:
        """Say whether the server generates one token for the model."""
        try:
            return bool((await self._ping()).json()["choices"])
        except (OpenAIError, ValueError, TypeError, LookupError, RecursionError, TimeoutError):
            return False

    async def gone(self) -> bool:
        """Say whether nothing answers for the model any more. Whoever refuses this request, or lets it wait, is there.

        Some servers take no request for one token, and one that is busy may not answer in time.
        """
        try:
            (await self._ping()).json()
        except APIStatusError as error:
            return error.status_code == 404 or error.status_code >= 500 or error.status_code in PASSING
        except (APITimeoutError, TimeoutError):
            return False
        except (OpenAIError, ValueError, RecursionError):  # no connection, or a page
            return True
        return False

    async def unknown(self) -> bool:
        """Say whether the server has no such model (HTTP 404), asked for one token of it."""
        try:
            await self._ping()
        except (OpenAIError, TimeoutError) as error:
            return getattr(error, "status_code", None) == 404
        return False

    async def _ping(self) -> Response:
        async with asyncio.timeout(min(PROBE_SECONDS, self.endpoint.timeout)):
            return await self._hasty.post(CHAT, body=self._body(messages=PING, max_tokens=1), cast_to=Response)

    def fields_of(self, question: Askable) -> dict[str, Any]:
        """Return the fields that question and user set in a request; `None` stands for a field that is left out."""
        return self._question_fields(question) | dict(self.endpoint.request)

    def _question_fields(self, question: Askable) -> dict[str, Any]:
        fields = question.fields(self.decoding, self.free_tokens)
        if self.samples > 1 and fields.get("logprobs"):
            return fields | {"logprobs": None, "top_logprobs": None, "n": self.samples, "temperature": 1}
        return fields

    def _body(self, **fields: Any) -> dict[str, Any]:
        """Return a request's fields, with those that the user sets over the others."""
        fields = {"model": self.model} | fields | dict(self.endpoint.request)
        return {name: value for name, value in fields.items() if value is not None}

    def _fault(self, error: "APIStatusError | APIConnectionError | UnreadableAnswer") -> TransportError:
        if isinstance(error, UnreadableAnswer):
            return self._error(str(error))
        if isinstance(error, APIConnectionError):
            cause: BaseException = error
            while cause.__cause__ is not None:  # the outer ones call every failed connection a timeout
                cause = cause.__cause__
            text = str(cause)[:MOST_WORDS] or "no connection, or no answer in time"
            if "CERTIFICATE_VERIFY_FAILED" in text:
                text += "; name the file of the authority that signed the server's certificate in SSL_CERT_FILE"
            elif getproxies().keys() & {urlsplit(self.url).scheme, "all"} and urlsplit(self.url).hostname not in LOCAL:
                text += "; the environment names a proxy: HTTP_PROXY, HTTPS_PROXY or ALL_PROXY (not for NO_PROXY)"
            return self._error(f"{type(cause).__name__}: {text}", "down")
        status = error.status_code
        message, headers = "", error.response.headers
        with suppress(ValueError, RecursionError):  # of what is no JSON, which may be any page
            message = words_of(error.response.json())
        text = (message or f"Error code: {status}")[:MOST_WORDS]
        if 300 <= status < 400:
            text = (
                f"a redirect to {headers.get('location', '')[:MOST_WORDS]}, which is not followed;"
                f" if that is the {self.role}, name it in {self.role}_url"
            )
        if status == 404 and not urlsplit(self.url).path.strip("/"):
            text += f" (does {self.role}_url end in /v1?)"
        if status in (400, 403) and FLAGGED.search(message):
            text += f" ({WITHHELD})"
        elif status in (401, 403):
            state = "" if self._key else " is not set and"
            variable = f"the environment variable {self.endpoint.api_key_env}{state} should hold the key"
            text += f" ({variable}; see {self.role}_api_key_env)"
        fault = self._error(f"HTTP {status}: {text}", fault_of(status), status)
        with suppress(ValueError, OverflowError):
            fault.retry_after = seconds_until(headers.get("retry-after", ""))
        return fault

    def _name_model(self, answered: Any) -> None:
        """Say once which other model answers in place of the one that was asked, as a router or a fallback chooses."""
        if not isinstance(answered, str) or not answered or same_model(self.model or answered, answered):
            return
        if len(OTHERS) < MOST_OTHERS and (self.url, answered) not in OTHERS:
            OTHERS.add((self.url, answered))
            logger.warning(
                "the %s server %s was asked for the model %s and answers as %s: unless that is its other name, take"
                " a server that answers with one model, because verdicts of several do not compare",
                *(self.role, self.server, self.model, printable(self._without_key(answered[:MOST_WORDS]))),
            )

    def _name_provider(self, provider: Any) -> None:
        """Say once that a router answers by several providers, whose weights and precision may differ."""
        if not isinstance(provider, str) or PROVIDERS.setdefault(self.url, provider) in (provider, ""):
            return
        logger.warning(
            "the %s server %s answers by several providers, such as %s and %s, whose verdicts may differ: name one in"
            ' %s_request, {"provider": {"only": ["..."], "allow_fallbacks": false}}',
            *(self.role, self.server, printable(PROVIDERS[self.url][:MOST_WORDS]), printable(provider[:MOST_WORDS])),
            self.role,
        )
        PROVIDERS[self.url] = ""

    def _error(self, message: str, kind: str = "refused", status: int | None = None) -> TransportError:
        return TransportError(message, kind, status, self._key)

    def _without_key(self, text: str) -> str:
        # Logs and checkpoints may quote it. A key of a few characters, such as `none`, can be a part of any answer.
        return masked(text, self._key) if self._key and len(self._key) >= ECHOED else text

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()


def with_headers(client: AsyncOpenAI, headers: Mapping[str, str]) -> AsyncOpenAI:
    """Let a client send these headers, and nothing that it would take from the environment to any address."""
    client._custom_headers = headers
    if client.base_url.host != OPENAI:
        client.organization = client.project = None
    return client


class UnreadableAnswer(OpenAIError):
    """An answer that is not read to its end, because of its size or its encoding."""

    def __init__(self, message: str, request: Request):
        super().__init__(message)
        self.request = request


class BoundedClient(DefaultAioHttpClient):
    """An HTTP client whose answers have an end, in bytes and in seconds, and that follows no redirect.

    Args:
        timeout (`float`):
            Seconds without a byte.
        turns ([`Turns`]):
            Told which chats were answered in time.
    """

    def __init__(self, timeout: float, turns: Turns):
        super().__init__(
            timeout=timeout,
            mounts=DIRECT,
            follow_redirects=False,  # they would hand prompts to another server
            headers={"Accept-Encoding": ", ".join(ENCODINGS[1:])},
            # 0 is no limit: `concurrency` is the limit, and aiohttp's own one of 100 would undercut it.
            limits=Limits(max_connections=0, keepalive_expiry=IDLE_SECONDS),
        )
        self._seconds = TOTAL_TIMEOUTS * timeout  # of a whole answer, since a byte now and then could hold it for ever
        self._turns = turns

    async def send(self, request: Request, **kwargs: Any) -> Response:
        """Send a request and read its whole answer."""
        if not request.url.path.endswith(CHAT):
            return await self._send_whole(request, **kwargs)
        if request.headers.get("x-stainless-retry-count", "0") != "0":
            await self._turns.again()
        cuts = self._turns.cuts
        try:
            response = await self._send_whole(request, **kwargs)
        except ReadTimeout:
            self._turns.ended(cuts, late=True)
            raise
        if response.is_success or response.status_code in SLOW:
            self._turns.ended(cuts, late=response.status_code in SLOW)
        return response

    async def _send_whole(self, request: Request, **kwargs: Any) -> Response:
        try:
            async with asyncio.timeout(self._seconds):
                response = await super().send(request, **kwargs | {"stream": True})
                try:
                    body = await read_body(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise ReadTimeout(f"no whole answer within {self._seconds:g} s", request=request) from None
        status = response.status_code
        if response.is_success and (fault := fault_in_content(body)):  # so that it is retried as that status is
            status, words = fault
            body = json.dumps({"error": {"message": f"inside an answer with HTTP 200: {words}"}}).encode()
        elif status in (400, 403, 429) and NO_CREDIT.search(body):  # so that it is neither retried nor waited for
            status = 402
        # The body is decompressed already.
        headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"content-encoding"]
        if status in PASSING:
            headers.append((b"x-should-retry", b"true"))  # the client's own list is 408, 409, 429 and 5xx
        return Response(status, headers=headers, content=body, request=request)


async def read_body(response: Response) -> bytes:
    """Read and decompress a body, at most `MOST_BYTES` of it."""
    encoding = response.headers.get("content-encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise UnreadableAnswer(f"the answer has the content encoding {encoding[:50]!r}", response.request)
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MOST_BYTES:
            raise UnreadableAnswer(f"the answer has more than {MOST_BYTES // 2**20} MB", response.request)
    return bytes(body)


def fault_of(status: int) -> str:
    """Return which kind of [`TransportError`] an HTTP status is."""
    if status in GONE:
        return "down"
    return "busy" if status in (408, 409, 429, *PASSING) or status >= 500 else "refused"


def same_model(requested: str, answered: str) -> bool:
    """Say whether two names stand for one model: a path before it, a date, a version or a variant makes no other."""
    short, long = sorted((name.rpartition("/")[2].lower() for name in (requested, answered)), key=len)
    return bool(re.fullmatch(re.escape(short) + VARIANT, long))


def retries(end: Response | APIStatusError | APIConnectionError | UnreadableAnswer) -> int:
    """Count how often the request was sent again until its answer or error."""
    return int(end.request.headers.get("x-stainless-retry-count", 0))


def seconds_until(after: str) -> float:
    """Return the seconds that a `Retry-After` names, or raise `ValueError`."""
    try:
        seconds = float(after)
    except ValueError:
        seconds = parsedate_to_datetime(after).timestamp() - time.time()  # it may also be a date
    return max(0.0, seconds)


def context_of(model: Any) -> int | None:
    """Return the context length of a listed model in tokens, if the server says a sane one (vLLM, llama.cpp)."""
    meta = getattr(model, "meta", None)
    length = getattr(model, "max_model_len", None) or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    return length if type(length) is int and length > 0 else None
