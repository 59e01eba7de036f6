"""A vLLM server to test against: our own with a tiny random model, or one that is already running."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.ports import free_ports

from rankbuffer_trl.judge import Call, Judge, Question

MODEL = "judge"
CONTEXT = 32768  # room for answers that a cancelled request has no time to finish
FLAGS = (
    *("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--generation-config", "vllm"),
    # What docs/judge.md recommends: cached tokens in every answer, no free white space in a JSON schema.
    "--enable-prompt-tokens-details",
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    # What TRL's rollouts need (recipes/README.md): the server of the tests is judge and rollout server in one.
    *("--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"),
    *("--max-logprobs", "-1"),
    "--enforce-eager",  # compiling would need a C++ compiler and is not what is tested
)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",  # by default 5 s: a busy server then closes connections that are in use
    "VLLM_SERVER_DEV_MODE": "1",  # TRL reads the server's settings and resets its prefix cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
START_SECONDS = 300
STOP_SECONDS = 20


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` for a limited time and tell whether another process has met it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def until(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Wait for `condition`, and fail if it is not met in time."""
    if not wait(condition, seconds):
        pytest.fail(f"after {seconds:g} s still not: {what}")


def ask(judge: Judge, questions: Sequence[Question]) -> tuple[list, list[Call]]:
    """Ask all questions at once. Return the verdicts in their order, and the calls."""

    async def run():
        try:
            return await judge.ask_all(questions)
        finally:
            await judge.client.close()

    verdicts = asyncio.run(run())
    assert len(judge.calls) == len(questions)
    return verdicts, judge.drain()


class Counters(NamedTuple):
    """The counters of a server since its start. Two of them can be subtracted."""

    prompt: float
    cached: float
    completion: float
    cache_queries: float
    cache_hits: float
    stopped: float
    cut_off: float

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Server:
    """A vLLM server that answers under `url`.

    Args:
        url (`str`):
            Base URL, with `/v1`.
        model (`str`):
            The name of the model it serves.
        process (`subprocess.Popen`, *optional*):
            The server's main process, if it is ours. It leads a process group of its own.
        log (`Path`, *optional*):
            Where it writes, if it is ours.
    """

    def __init__(self, url: str, model: str, process: subprocess.Popen | None = None, log: Path | None = None):
        self.url = url
        self.root = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self.process = process
        self.log = log

    def call(self, path: str, body: dict | None = None) -> bytes:
        """Return the answer to a GET of `path`, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric over all engines and over all label sets that contain `labels`."""
        lines = re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", self.call("/metrics").decode(), re.MULTILINE)
        return sum(float(value) for found, value in lines if labels in found)

    @property
    def in_flight(self) -> float:
        """Return the number of requests that the server works on or has in its queue."""
        return self.metric("num_requests_(?:running|waiting)")

    def counters(self) -> Counters:
        """Return the counters when no request is in flight."""
        until(lambda: self.in_flight == 0, "nothing in flight at the server")
        return Counters(
            prompt=self.metric("prompt_tokens_total"),
            cached=self.metric("prompt_tokens_cached_total"),
            completion=self.metric("generation_tokens_total"),
            cache_queries=self.metric("prefix_cache_queries_total"),
            cache_hits=self.metric("prefix_cache_hits_total"),
            stopped=self.metric("request_success_total", 'finished_reason="stop"'),
            cut_off=self.metric("request_success_total", 'finished_reason="length"'),
        )

    def since(self, before: Counters, requests: int | None = None) -> Counters:
        """Return the increase of the counters since `before`, after `requests` answers if that is given."""
        added = self.counters() - before
        answered = added.stopped + added.cut_off
        assert requests in (None, answered), (
            f"{answered:g} answers where {requests} are right: does somebody else ask as well?"
        )
        return added

    @property
    def context(self) -> int:
        """Return the number of tokens that a prompt and its answer can have together."""
        models = json.loads(self.call("/v1/models"))["data"]
        return next(model["max_model_len"] for model in models if model["id"] == self.model)

    def tokenize(self, **body) -> list[int]:
        """Return the token ids of a `prompt` or of `messages`."""
        return json.loads(self.call("/tokenize", {"model": self.model, **body}))["tokens"]

    def healthy(self) -> bool:
        """Tell whether the server says that it is ready."""
        try:
            self.call("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    @property
    def died(self) -> bool:
        """Tell whether our own server has ended or can no longer generate."""
        return self.process is not None and (self.process.poll() is not None or not self.healthy())

    def last_words(self) -> str:
        """Return the last lines of the server's log."""
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return "The last lines of its log:\n" + "\n".join(lines)

    def crash(self) -> None:
        """Kill the process that holds the sockets, without a warning."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """End all processes of the server. They get time to free their shared memory before they are killed."""
        try:
            if self._signal(signal.SIGTERM):
                wait(lambda: not self._signal(0), STOP_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: int) -> bool:
        """Send a signal to the process group and tell whether a process was there."""
        self.process.poll()  # a process that nobody has waited for still counts as there
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def start(
    python: str, model: Path, folder: Path, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Server:
    """Start a server for `model` on a free loopback port and wait until it is ready.

    Args:
        python (`str`):
            The interpreter of an environment with vLLM.
        model (`Path`):
            The model's folder.
        folder (`Path`):
            Where the server runs and logs.
        flags (`Sequence[str]`, *optional*):
            Arguments in addition to `FLAGS`.
        environment (`Mapping[str, str]`, *optional*):
            Variables in addition to `ENVIRONMENT`.
    """
    port = free_ports(1)[0]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    log = folder / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--model", str(model), *FLAGS, *flags],
            cwd=folder,
            env=inherited | ENVIRONMENT | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}/v1", MODEL, process, log)
    try:
        wait(lambda: process.poll() is not None or server.healthy(), START_SECONDS)
        status = process.poll()
        ready = status is None and server.healthy()
    except BaseException:
        server.stop()
        raise
    if not ready:
        server.stop()
        fault = f"was not ready after {START_SECONDS} s" if status is None else f"ended with status {status}"
        pytest.fail(f"the server {fault}. {server.last_words()}", pytrace=False)
    return server


class Keeper:
    """A keeper that starts a server when a test first needs one, and once more if the server has died.

    Args:
        start (`Callable[[], Server]`):
            Starts one.
    """

    STARTS = 2

    def __init__(self, start: Callable[[], Server]):
        self.start = start
        self.started: list[Server] = []

    def server(self) -> Server:
        """Return a server that is alive."""
        if not self.started or self.started[-1].died:
            if len(self.started) == self.STARTS:
                pytest.fail(f"the server has died {self.STARTS} times. {self.started[-1].last_words()}", pytrace=False)
            self.stop()
            self.started.append(self.start())
        return self.started[-1]

    def stop(self) -> None:
        """End what is left of the newest server."""
        if self.started:
            self.started[-1].stop()


def build_model(folder: Path, texts: list[str], **size: int) -> Path:
    """A Qwen3 of two layers with random weights, and the quickstart's tokenizer with its chat template."""
    import policy
    import torch

    tokenizer = policy.build_tokenizer(texts)
    torch.manual_seed(0)
    default = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    default |= {"head_dim": 32, "max_position_embeddings": CONTEXT}
    model = policy.build_model(tokenizer, **(default | size))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
