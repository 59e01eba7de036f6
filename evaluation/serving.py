"""A vLLM server for one model: started, waited for, ended with all its processes."""

import ctypes
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rankbuffer_trl.errors import RankBufferError

START_SECONDS = 3600
"""For loading a large model from a slow disk; a server that ends earlier is noticed at once."""

STOP_SECONDS = 30
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class EngineError(RankBufferError, RuntimeError):
    """Responses cannot be generated. The message says why."""


@contextmanager
def vllm_server(
    program: Sequence[str], arguments: Sequence[str], label: str, model: str, adapter_of: str | None, log: Path
) -> Iterator[str]:
    """Start `vllm serve` on a free loopback port, and end it.

    Args:
        program (`Sequence[str]`):
            How it is called, such as `["vllm", "serve"]`.
        arguments (`Sequence[str]`):
            More arguments for it.
        label (`str`):
            The name under which the model is served.
        model (`str`):
            The model, or an adapter.
        adapter_of (`str`, *optional*):
            The model to which an adapter belongs.
        log (`Path`):
            Where the server logs.

    Returns:
        `Iterator[str]`: the base URL.

    Raises:
        [`EngineError`]: if it does not start, with the last lines of its log.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*program, adapter_of or model, "--host", "127.0.0.1", "--port", str(port)]
    if adapter_of:
        command += ["--enable-lora", "--lora-modules", f"{label}={model}", *rank_argument(model)]
    else:
        command += ["--served-model-name", label]
    command += ["--generation-config", "vllm", *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise EngineError(
                f"cannot start {command[0]!r}: {error}. Install the extra `vllm`, name a running server with"
                " engine_url, or set engine: transformers"
            ) from error
    try:
        await_server(process, port, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end(process)


def end_with_parent() -> None:
    """In the server's process: have it ended when this one dies, even by SIGKILL, so that it keeps no GPU (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def rank_argument(adapter: str) -> list[str]:
    """vLLM reserves room for adapters up to a rank, by default 16, and takes only powers of two."""
    from peft import PeftConfig

    rank = PeftConfig.from_pretrained(adapter).r
    return ["--max-lora-rank", str(max(16, 1 << (rank - 1).bit_length()))]


def await_server(process: subprocess.Popen, port: int, log: Path) -> None:
    """Wait until the server is ready.

    Raises:
        [`EngineError`]: if it ends or is not ready within an hour.
    """
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    fault = "is not ready after an hour" if process.poll() is None else f"ended with status {process.returncode}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise EngineError(f"the vLLM server {fault}. The end of its log, {log}:\n{tail}")


def end(process: subprocess.Popen) -> None:
    """End a server and all its processes: kindly, then for certain."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def base_of(model: str) -> str | None:
    """The model to which an adapter belongs; `None` for what is no adapter."""
    from peft import PeftConfig
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(model) is None:
        return None
    return PeftConfig.from_pretrained(model).base_model_name_or_path
