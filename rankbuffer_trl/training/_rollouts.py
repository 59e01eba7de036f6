"""Rollouts from a vLLM server with one request each, so that each can be judged as soon as it is generated.

TRL asks the server for all rollouts of a step with one request, whose answer comes when the longest rollout is done.
vLLM itself makes `n` sequences of a request with `n` samples, with the seeds `seed`, `seed + 1` and so on. So `n`
requests with these seeds give the same tokens.
"""

import asyncio
import heapq
import inspect
import math
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from accelerate import PartialState
from accelerate.logging import get_logger
from aiohttp import ClientSession, TCPConnector
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, DefaultAioHttpClient, OpenAIError, Timeout
from trl.generation.vllm_client import VLLMClient

from ..checkpointing._distributed import for_others
from ..data._prompts import render_messages
from ..errors import ServerError
from ..judge._errors import first_leaf, printable
from ..judge._http import Limits
from ..judge._openai_client import IDLE_SECONDS, LOCAL, context_of, fault_of, with_headers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

COUNTED_ROWS = 5  # prompts, the longest by characters
RETRIES = 8  # of one request, within 40 s
CONNECT_SECONDS = 60.0
# A server whose machine is gone never answers and never closes. It is noticed after 60 + 4 * 15 s.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
INDIVISIBLE = {"n", "use_beam_search"}  # generation_kwargs under which n requests are not one request for n
# What an answer that is no rollout raises while it is read. A deeply nested one is a RecursionError.
NO_ROLLOUT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class RolloutError(ServerError):
    """The rollout server does not generate."""


class NoRollouts:
    """What TRL gets in the place of rollouts, and sends to all processes: each that reads it raises the error."""

    # Only the main process generates. If it alone raised the error, the others would wait for its rollouts.
    def __init__(self, error: Exception):
        self.error = error

    def __reduce__(self) -> tuple:
        return NoRollouts, (for_others(self.error),)

    def __iter__(self) -> Iterator:
        raise self.error


class SeparateRollouts:
    """TRL's client of a vLLM server, except that `generate` sends one request per rollout.

    Args:
        client (`VLLMClient`):
            TRL's client, to which everything else goes.
        run (`Callable[[Coroutine], Any]`):
            Runs a coroutine on an event loop of another thread, and cancels it if it is interrupted, as
            [`GroupScorer.run_in_step`] does.
        on_rollout (`Callable[[int, list[int]], None]`):
            Called on that loop with the row and the token ids of each rollout when it is generated. Rows count through
            the rollouts of the first prompt, then those of the second, and so on.
        timeout (`float`, *optional*):
            Seconds that a generation may take. `None` is no limit.
        vocabulary (`int`, *optional*):
            The number of token ids of the policy. Default: any number.

    Example:
        >>> client = SeparateRollouts(VLLMClient(url), scorer.run, lambda row, ids: print(row, len(ids)))
        >>> client.generate([[9707, 11]], n=8)["completion_ids"]
    """

    def __init__(
        self,
        client: VLLMClient,
        run: Callable[[Coroutine], Any],
        on_rollout: Callable[[int, list[int]], None],
        timeout: float | None = None,
        vocabulary: float = math.inf,
    ):
        self._client = client
        self._run = run  # since `requests`, which TRL's client uses, cannot be interrupted
        self._on_rollout = on_rollout
        self._timeout = timeout
        self._vocabulary = vocabulary
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        openai = AsyncOpenAI(
            base_url=f"{client.base_url}/v1",
            api_key="none",  # TRL's client sends none either; this one needs some text
            max_retries=RETRIES,
            timeout=Timeout(None, connect=CONNECT_SECONDS),  # `timeout` limits the whole generation
            http_client=KeepaliveClient(
                timeout=None,
                follow_redirects=False,  # they would hand the prompts to another server
                # Each connection is an open file, of which the process needs some for itself. 0 is no limit.
                limits=Limits(max_connections=max(files // 2, 0), keepalive_expiry=IDLE_SECONDS),
            ),
        )
        self._openai = with_headers(openai, {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        features: list[dict | None] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict | None = None,
    ) -> dict[str, Any]:
        """Generate as [`~trl.generation.vllm_client.VLLMClient.generate`] does, with the same arguments and result.

        Raises:
            [`RolloutError`]: if a request fails after all retries, if its answer is no rollout, or if all of them take
            longer than `timeout`.
        """
        sampling: dict[str, Any] = {
            "repetition_penalty": repetition_penalty,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        arguments = generation_kwargs or {}
        if features is not None or INDIVISIBLE & arguments.keys():
            return self._client.generate(
                prompts,
                features,
                n=n,
                structured_outputs_regex=structured_outputs_regex,
                generation_kwargs=generation_kwargs,
                **sampling,
            )
        if structured_outputs_regex is not None:
            sampling["structured_outputs"] = {"regex": structured_outputs_regex}
        payload = {
            "model": self._client.model,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "n": 1,
            **sampling,
            **arguments,
        }
        seed = payload.get("seed")
        payloads = [
            # The seeds that vLLM gives to `n` samples of a request.
            payload | {"prompt": [prompt]} | ({} if seed is None else {"seed": seed + i})
            for prompt in prompts
            for i in range(n)
        ]
        try:
            rollouts = self._run(self._generate(payloads))
        except Exception as error:
            if PartialState().num_processes == 1:
                raise
            # TRL sends these to all processes, so that none waits for rollouts.
            return dict.fromkeys(("prompt_ids", "completion_ids", "logprobs"), NoRollouts(error))
        with_logprobs = all(rollout["logprobs"] is not None for rollout in rollouts)
        return {
            "prompt_ids": [rollout["prompt_ids"] for rollout in rollouts[::n]],
            "completion_ids": [rollout["completion_ids"] for rollout in rollouts],
            "logprobs": [rollout["logprobs"] for rollout in rollouts] if with_logprobs else None,
            "logprob_token_ids": [rollout["logprob_token_ids"] for rollout in rollouts] if with_logprobs else None,
        }

    async def _generate(self, payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(self._timeout), asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._rollout(row, payload)) for row, payload in enumerate(payloads)]
        except TimeoutError:
            arrived = sum(not task.cancelled() for task in pending)
            cause = f"{arrived} of {len(pending)} rollouts came within rollout_timeout={self._timeout:g} s"
            raise self._fault(cause) from None
        except BaseExceptionGroup as errors:
            raise first_leaf(errors) from None
        return [task.result() for task in pending]

    async def _rollout(self, row: int, payload: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: Any = await self._openai.post("/completions", body=payload, cast_to=object)
            # Here, while others are still generated.
            rollout = read_rollout(answer, payload["max_tokens"], self._vocabulary)
        except (OpenAIError, *NO_ROLLOUT) as error:
            final = isinstance(error, APIStatusError) and fault_of(error.status_code) == "refused"
            raise self._fault(cause_of(error), passing=not final) from error
        self._on_rollout(row, rollout["completion_ids"])
        return rollout

    def _fault(self, cause: str, passing: bool = True) -> RolloutError:
        return RolloutError(
            f"the rollout server at {self._client.base_url} does not generate ({cause}): look at its log, start it"
            " again, then resume from the last checkpoint",
            passing,
        )

    def close(self) -> None:
        """Close the connections."""
        self._run(self._openai.close())


class KeepaliveClient(DefaultAioHttpClient):
    """The HTTP client of `openai` on aiohttp, whose connections notice that the other machine is gone."""

    def _init_transport(self, *args: Any, **settings: Any) -> Any:
        transport: Any = super()._init_transport(*args, **settings)
        transport.client = lambda: ClientSession(
            connector=TCPConnector(
                limit=transport.limits.max_connections,
                keepalive_timeout=transport.limits.keepalive_expiry,
                ssl=transport.ssl_context,
                socket_factory=keepalive_socket,
            )
        )
        return transport


def keepalive_socket(address: tuple) -> socket.socket:
    """Make a socket for an address of `socket.getaddrinfo`. It asks a silent other side whether it is there."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def read_rollout(answer: Any, max_tokens: int | None, vocabulary: float = math.inf) -> dict[str, Any]:
    """Read the answer of a server to a request for one rollout.

    Args:
        max_tokens (`int`, *optional*):
            The number of tokens that a rollout may have. `None` is no limit.
        vocabulary (`int`, *optional*):
            The number of token ids. Default: any number.

    Raises:
        `NO_ROLLOUT`: if it is none that the policy could have sampled.
    """
    from trl.generation.vllm_client import parse_logprobs  # if TRL renames it, runs without a server still train

    (choice,) = answer["choices"]
    if choice.get("finish_reason") == "abort":
        raise ValueError("the rollout was aborted")
    prompt_ids, completion_ids = choice["prompt_token_ids"], choice["token_ids"]
    parsed = parse_logprobs([choice["logprobs"]])
    logprobs, logprob_token_ids = (each[0] if each else None for each in parsed)
    for ids in (prompt_ids, completion_ids, *(logprob_token_ids or ())):
        if type(ids) is not list or not all(type(id) is int and 0 <= id < vocabulary for id in ids):
            raise ValueError("token ids that the policy does not have")
    if max_tokens is not None and len(completion_ids) > max_tokens:
        raise ValueError(f"{len(completion_ids)} tokens, {max_tokens} were asked for")
    if logprobs is not None:
        if len(logprobs) != len(completion_ids):
            raise ValueError(f"log-probabilities of {len(logprobs)} tokens for {len(completion_ids)}")
        if not all(value is not None and math.isfinite(value) for values in logprobs for value in values):
            raise ValueError("a log-probability that is not finite")
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "logprob_token_ids": logprob_token_ids,
    }


def cause_of(error: Exception) -> str:
    """Return in one line why a request failed."""
    if isinstance(error, APIStatusError) and error.response.has_redirect_location:
        location = error.response.headers["location"]
        return printable(f"HTTP {error.status_code}: a redirect to {location[:200]}, which is not followed")
    if isinstance(error, APIStatusError):
        return printable(f"HTTP {error.status_code}: {error.response.text[:300]}")
    if isinstance(error, APIConnectionError):
        return printable(f"{error} {error.__cause__ or ''}"[:300])
    return printable(f"not a completion of vLLM, {type(error).__name__}: {error}"[:300])


def limit_requests(client: VLLMClient, seconds: float) -> None:
    """Let a request of TRL's client end after so many seconds without an answer."""
    # TRL sets no limit to them. They send weights, and ask for the rollouts that `SeparateRollouts` does not ask for.
    client.session.request = partial(client.session.request, timeout=(CONNECT_SECONDS, seconds))


def send_copies(client: VLLMClient) -> None:
    """Send weights as they are when TRL yields them, and let the server forget what it computed with older ones."""
    send = client.update_named_params
    client.update_named_params = lambda metadata, weights: send(metadata, copies(weights))
    client.reset_prefix_cache = partial(forget_prefixes, client)


def copies(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of weights, each made when the GPU has nothing else to do."""
    # vLLM packs weights when its buffer is full or none is left. By then TRL has taken the adapter out of the last
    # ones, whose layers would answer as those of the base. vLLM also takes them in a stream that waits neither for the
    # optimizer nor for the broadcast before, beside which a gather may wait for ever (huggingface/trl#6797).
    settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    settle()
    for name, weight in weights:
        yield name, weight.clone()
        settle()
    settle()  # the adapter is out of the base


def forget_prefixes(client: VLLMClient) -> None:
    """Empty the server's cache of prefixes, even while it works on requests that a killed run has left behind."""
    try:
        answer = client._post(f"{client.base_url}/reset_prefix_cache", params={"reset_running_requests": "true"})
    except ValueError:  # an older vLLM says nothing
        return
    if answer == {"success": False}:  # TRL does not look
        logger.warning(
            f"the rollout server {client.base_url} keeps prefixes that the policy of an earlier step has computed,"
            " because it works on other requests: let it serve this run alone"
        )


def spare_proxy(url: str) -> None:
    """Let no proxy of the environment come between a run and the rollout server on its machine; name one elsewhere."""
    host, proxies = urlsplit(url).hostname or "", getproxies()
    if not proxies.keys() & {urlsplit(url).scheme, "all"} or proxy_bypass(host):
        return
    if host in (*LOCAL, "0.0.0.0"):
        spared = ",".join(filter(None, [proxies.get("no"), host]))
        os.environ.update(NO_PROXY=spared, no_proxy=spared)  # TRL's client and `requests` read them
    else:
        logger.warning(f"the rollout server {url} is asked through the environment's proxy: add {host} to NO_PROXY")


def check_prompt_lengths(
    client: VLLMClient,
    tokenizer: "PreTrainedTokenizerBase",
    rows: Iterable[Mapping[str, Any]],
    length: int,
    **template: Any,
) -> None:
    """Refuse a rollout server whose context is too short for the longest prompt and `length` tokens after it."""
    served = client._get(f"{client.base_url}/v1/models")["data"][0]
    if not (context := context_of(SimpleNamespace(**served))):
        logger.warning(
            f"the rollout server {client.base_url} does not say whether its context holds prompt and rollout"
        )
        return
    longest = heapq.nlargest(COUNTED_ROWS, rows, key=lambda row: sum(len(each["content"]) for each in row["prompt"]))
    texts = (render_messages(tokenizer, row["place"], row["prompt"], **template) for row in longest)
    prompt = max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    if prompt + length > context:
        raise RolloutError(
            f"the rollout server {client.base_url} has a context of {context:,} tokens, too short for a prompt of"
            f" {prompt:,} and max_completion_length={length:,}: start it with --max-model-len {prompt + length}",
            passing=False,
        )


def known_to_us() -> bool:
    """Return whether TRL's `generate` has the arguments that [`SeparateRollouts.generate`] was written for."""
    theirs, ours = (
        [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]
        for method in (VLLMClient.generate, SeparateRollouts.generate)
    )
    return theirs == ours


def separate_rollouts(trainer: Any, arrived: Callable[[int, list[int]], None]) -> SeparateRollouts | None:
    """Let a trainer send one request per rollout, if each can be judged when the server has generated it."""
    if not (trainer.args.judge_during_generation and trainer.use_vllm and trainer.vllm_mode == "server"):
        return None
    if trainer.tools or trainer.rollout_func or trainer.environment_factories is not None:
        return None  # what the server generates is not the whole rollout
    if not trainer.accelerator.is_main_process:  # it alone has a client
        return None
    if not known_to_us():
        logger.warning(
            "this version of TRL generates with other arguments than RankBuffer knows: judging starts after generation"
        )
        return None
    # TRL has no hook per rollout: a rollout_func would take the user's place for one, and would have to tokenize,
    # gather and slice on every process. The client below all that is a public object, and it is replaced here, while
    # the trainer is being made, by one with the same methods. TRL's own class is left as it is.
    generation = trainer.vllm_generation
    generation.vllm_client = SeparateRollouts(
        generation.vllm_client,
        trainer.rank_reward.scorer.run_in_step,
        arrived,
        trainer.args.rollout_timeout,
        trainer.model.config.get_text_config().vocab_size,
    )
    return generation.vllm_client
