"""Engines that generate responses: a vLLM server, or transformers in this process."""

import asyncio
import ctypes
import errno
import hashlib
import logging
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import httpx
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.files import fingerprint
from rankbuffer_trl.judge import Call, Judge, Usage
from rankbuffer_trl.judge.config import OpenAIClient

from .ask import AnswerLog, Answers, ask_many, failures_text, hash_request, progress
from .chat import Chat
from .sampling import Prompt, SamplingConfig

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 3600.0  # a response arrives in one piece, after all of its tokens
START_SECONDS = 3600  # a large model on a slow disk; a server that ends earlier is noticed at once
STOP_SECONDS = 30
PR_SET_PDEATHSIG = 1  # of Linux' prctl
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
# No engine reads these.
TRAINING_FILES = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

# A folder of a model or of a tokenizer has one of them; the last one is of Mistral's own format.
MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json", "params.json")


class EngineError(RankBufferError, RuntimeError):
    """Responses cannot be generated. The message says why."""


class Engine(Protocol):
    """[`VllmEngine`] or [`TransformersEngine`]."""

    def respond(self, prompts: Sequence[Prompt], log: Path, what: str) -> Answers:
        """Return one response for each prompt, by its id. Those that `log` holds are not generated again.

        Raises:
            [`JudgeError`]: if the server cannot be reached or its context is too small.
            [`EngineError`]: if prompts have no response.
        """


def request_of(config: SamplingConfig, prompt: Prompt) -> dict[str, Any]:
    """Return the sampling of one response as fields of a request to vLLM."""
    fields: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_tokens": config.max_new_tokens,
        # Of the prompt, whatever the order of requests.
        "seed": None if config.seed is None else seed_of(config.seed, prompt.id),
    }
    if config.chat_template_kwargs:
        fields["chat_template_kwargs"] = config.template_kwargs()
    return fields


def seed_of(seed: int, *ids: str) -> int:
    """Derive a non-negative 31-bit seed from `seed` and `ids`."""
    return int.from_bytes(hashlib.sha256(" ".join([str(seed), *ids]).encode()).digest()[:4]) >> 1


def whole_text(text: str, cut_off: bool) -> str | dict[str, Any]:
    """Return a response with its thinking. One that was cut off says so."""
    return {"text": text, "cut_off": True} if cut_off else text  # a text alone, as logs of earlier versions have it


class VllmEngine:
    """A running vLLM server, at a URL with `/v1`, where the model has the name `served`."""

    def __init__(self, url: str, served: str, model: str, config: SamplingConfig):
        # `model`: a logged response of another one is not used.
        self.url, self.served, self.model, self.config = url, served, model, config

    def respond(self, prompts: Sequence[Prompt], log: Path, what: str) -> Answers:
        """See [`Engine`]."""
        client = OpenAIClient(
            self.url, self.served, timeout=ANSWER_SECONDS, concurrency=self.config.engine_concurrency
        )
        chats = {
            prompt.id: Chat(
                "generate", prompt.id, prompt.messages, whole_text, request_of(self.config, prompt), partial=True
            )
            for prompt in prompts
        }
        answers = asyncio.run(ask_many(Judge(client), chats, log, what, self.model))
        if answers.kept and is_address(self.model):  # it does not tell its weights
            print(f"{what}: {answers.kept:,} are from {log}. If the server has a new policy since, delete that file")
        if answers.failures:
            raise EngineError(
                f"{what}: {len(answers.failures)} of {len(prompts)} prompts have no response."
                f" {failures_text(answers.failures)}. The others are kept; run the same command again"
            )
        cut = {name: value["text"] for name, value in answers.values.items() if not isinstance(value, str)}
        return replace(answers, values=answers.values | cut, cut_off=frozenset(cut))


class TransformersEngine:
    """A model in this process. Responses depend on the seed and on the prompts of the same batch."""

    def __init__(self, model: str, adapter_of: str | None, config: SamplingConfig):
        import torch
        from transformers import AutoModelForCausalLM

        # On Blackwell GPUs its kernel can give wrong answers (pytorch/pytorch#193893). Training does without it, too.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = config
        self.tokenizer = load_policy_tokenizer(model, adapter_of)
        self.tokenizer.padding_side = "left"  # a response follows the end of its prompt
        if self.tokenizer.pad_token is None:  # as of Llama 3.1; TRL takes the same one
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.network = AutoModelForCausalLM.from_pretrained(adapter_of or model, dtype="auto")
        if adapter_of:
            from peft import PeftModel

            self.network = PeftModel.from_pretrained(self.network, model)
        self.model = model_identity(model)  # now that it is here
        self.network.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def respond(self, prompts: Sequence[Prompt], log: Path, what: str) -> Answers:
        """See [`Engine`]."""
        keys = [
            f"{prompt.id} {hash_request(self.model, prompt.messages, request_of(self.config, prompt))}"
            for prompt in prompts
        ]
        size = self.config.engine_batch_size
        with AnswerLog(log) as answered, progress() as bar:
            task = bar.add_task(what, total=len(prompts))
            for start in range(0, len(prompts), size):
                batch, names = prompts[start : start + size], keys[start : start + size]
                # Whole: its prompts share one stream of random numbers.
                if any(name not in answered for name in names):
                    for name, (text, call) in zip(names, self._generate(batch), strict=True):
                        if name not in answered:
                            answered.add(name, text, call)
                bar.advance(task, len(batch))
            named = {prompt.id: name for prompt, name in zip(prompts, keys, strict=True)}
            calls = {id: answered.call(name) for id, name in named.items()}
            return Answers({id: answered[name] for id, name in named.items()}, {}, answered.calls, calls)

    def _generate(self, batch: Sequence[Prompt]) -> list[tuple[str, Call]]:
        import torch

        config = self.config
        started = time.perf_counter()
        inputs = self.tokenizer.apply_chat_template(
            [prompt.messages for prompt in batch],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
            **config.template_kwargs(),
        ).to(self.network.device)
        if config.seed is not None:
            torch.manual_seed(seed_of(config.seed, *(prompt.id for prompt in batch)))
        sampling: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if config.temperature:
            sampling = {
                "do_sample": True,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k,
            }
        with torch.inference_mode():
            ids = self.network.generate(
                **inputs,
                max_new_tokens=config.max_new_tokens,
                repetition_penalty=1.0,  # as in training and on vLLM; the model's own file may name another one
                **sampling,
            )
        width = inputs["input_ids"].shape[1]
        texts = self.tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        seconds = (time.perf_counter() - started) / len(batch)
        pad = self.tokenizer.pad_token_id
        results = []
        for prompt, mask, made, text in zip(batch, inputs["attention_mask"], ids[:, width:], texts, strict=True):
            usage = Usage(int(mask.sum()), 0, int((made != pad).sum()))  # without padding
            call = Call("", "generate", prompt.id, "transformers", "parsed", 1, usage, usage, seconds)
            results.append((text, call))
        return results


@contextmanager
def engine(config: SamplingConfig, label: str, model: str, adapter_of: str | None, log: Path) -> Iterator[Engine]:
    """Open the engine that generates for one model. `log` is the file of the log of a server that it starts."""
    if is_address(model):  # served there, under its label
        yield VllmEngine(model, label, f"{model} {label}", config)  # it may serve several
    elif config.engine == "transformers":
        yield TransformersEngine(model, adapter_of, config)
    else:
        program, arguments = config.engine_command.split(), config.engine_arguments
        with vllm_server(program, arguments, label, model, adapter_of, log) as url:
            yield VllmEngine(url, label, model_identity(model), config)


def load_policy_tokenizer(model: str, adapter_of: str | None) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        [`SettingsError`]: as [`check_model`].
        [`EngineError`]: if there is no tokenizer, or none with a chat template.
    """
    check_model(model)
    from transformers import AutoTokenizer

    faults = []
    for name in filter(None, (model, adapter_of)):  # an adapter may have no tokenizer of its own
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            faults.append(f"{name}: {error}")
            continue
        if tokenizer.chat_template:
            return tokenizer
        faults.append(f"{name} has no chat template")
    raise EngineError(
        f"no tokenizer for {model!r} with a chat template. It must be an instruction-tuned checkpoint or an id on the"
        f" Hub. {' '.join(' '.join(faults).split())[:500]}"
    )


@contextmanager
def vllm_server(
    program: Sequence[str], arguments: Sequence[str], label: str, model: str, adapter_of: str | None, log: Path
) -> Iterator[str]:
    """Run `vllm serve` on a free loopback port for the duration of the context. Yield the base URL.

    Raises:
        [`EngineError`]: if the server does not start, with the last lines of its log.
    """
    port = free_port()
    command = [*program, adapter_of or model, "--host", "127.0.0.1", "--port", str(port)]
    if adapter_of:
        command += ["--enable-lora", "--lora-modules", f"{label}={model}", *rank_argument(model)]
    else:
        command += ["--served-model-name", label]
    command += ["--generation-config", "vllm", *arguments]  # the model's own file may change the sampling
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of processes, which `end_server` ends whole
                preexec_fn=end_with_parent,
            )
        except OSError as error:
            raise EngineError(
                f"cannot start {command[0]!r}: {error}. Install the extra `vllm`, name a running server, or"
                " set engine: transformers"
            ) from error
    try:
        await_server(process, port, log)
        url = f"http://127.0.0.1:{port}/v1"
        if adapter_of:
            check_adapter(url, label, adapter_of)
        yield url
    finally:
        end_server(process)


def free_port() -> int:
    """Return a port of loopback that is free."""
    while True:
        # Below those of outgoing connections: vLLM binds it seconds later.
        port = random.SystemRandom().randrange(15000, 30000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def end_with_parent() -> None:
    """Ask Linux to end the calling process with its parent."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # in the server's process: it frees its GPU even after our SIGKILL


def rank_argument(adapter: str) -> list[str]:
    """Return the argument that makes room for an adapter."""
    from peft import PeftConfig

    rank = PeftConfig.from_pretrained(adapter).r
    # vLLM's default is 16, and it accepts only powers of two.
    return ["--max-lora-rank", str(max(16, 1 << (rank - 1).bit_length()))]


def await_server(process: subprocess.Popen, port: int, log: Path) -> None:
    """Wait until a server is ready. If it ends, or is not ready within an hour, raise [`EngineError`]."""
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


def check_adapter(url: str, label: str, base: str) -> None:
    """Say so if a server gives the same probabilities with an adapter and without it."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0, "logprobs": True}
    answers = []
    for model in (label, base):
        try:
            response = httpx.post(
                f"{url}/chat/completions", json=body | {"model": model}, timeout=300, trust_env=False
            )
            answers.append(response.json()["choices"][0]["logprobs"]["content"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return  # the first prompt will tell
    # vLLM passes over an adapter whose names it does not find, as of a text model that it serves with its images.
    if answers[0] and answers[0] == answers[1]:
        logger.warning(
            f"vLLM answers under the adapter {label!r} exactly as {base} does, so it does not apply it, or the adapter"
            " is untrained: merge it into its base, and name the folder of the whole model"
        )


def end_server(process: subprocess.Popen) -> None:
    """End a server with all its processes: by SIGTERM first, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def base_of(model: str) -> str | None:
    """Return the model to which an adapter belongs, `None` if `model` is no adapter.

    Raises:
        [`SettingsError`]: as [`check_folder`].
    """
    if is_address(model):
        return None
    check_folder(model)
    if not Path(model).is_dir() and hub_fault(model):
        return None  # the server may know the model from elsewhere
    from peft import PeftConfig
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(model) is None:
        return None
    return PeftConfig.from_pretrained(model).base_model_name_or_path


def check_model(name: str, revision: str | None = None) -> None:
    """Refuse a name of a model that the libraries would not find.

    Raises:
        [`SettingsError`]: as [`check_folder`], or if there is no such repository of the Hub.
    """
    check_folder(name)
    if not Path(name).is_dir() and (fault := hub_fault(name, revision)):
        raise SettingsError(f"there is no folder {name} here, and {fault}")


def check_folder(name: str) -> None:
    """Refuse a folder without a model.

    Raises:
        [`SettingsError`]: if there is no such folder, or no model in it. The message names a checkpoint if it has one.
    """
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in MODEL_FILES):
        saved = sorted(folder.glob("checkpoint-*"), key=lambda each: (len(each.name), each.name))
        advice = f"name a checkpoint of this run, such as {saved[-1]}" if saved else "name one that has a config.json"
        raise SettingsError(f"the folder {name} holds no model: {advice}")
    # No repository of the Hub has such a name.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not folder.is_dir():
        raise SettingsError(f"there is no folder {name}: models are folders, or repositories of the Hub")


def hub_fault(name: str, revision: str | None = None) -> str:
    """Return why neither the cache nor the Hub has a model; nothing if one has it, or if the libraries say why."""
    try:
        if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in MODEL_FILES):
            # Once. The libraries ask a Hub that is away six times for each file.
            get_hf_file_metadata(hf_hub_url(name, MODEL_FILES[0], revision=revision))
    except HfHubHTTPError as error:
        missing = isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
        return "the Hub has no repository of that name that you can read" if missing else ""
    except (OSError, ValueError, httpx.TransportError) as error:
        return f"the Hub cannot be asked for a repository of that name: {' '.join(str(error).split())}"
    return ""


def is_address(model: str) -> bool:
    """Return whether a model is named by the address of a server."""
    return model.startswith(("http://", "https://"))


def model_identity(model: str) -> str:
    """Return the name of a loaded model with what tells its present weights from others."""
    if weights := weights_of(model):
        return f"{model} {hashlib.sha256(repr(weights).encode()).hexdigest()[:16]}"
    if Path(model).exists():
        return model
    # An answer of other weights does not count.
    cached = (try_to_load_from_cache(model, file) for file in MODEL_FILES)
    commit = next((Path(path).parent.name for path in cached if isinstance(path, str)), "")
    return f"{model} {commit}".strip()


def weights_of(model: str) -> dict[str, list[int | str]]:
    """Return what tells the present weights of a folder from others, by file."""
    files = sorted(file for kind in WEIGHTS for file in Path(model).glob(kind) if file.name not in TRAINING_FILES)
    # Empty for a repository of the Hub.
    return {file.name: [file.stat().st_mtime_ns, *fingerprint(file)] for file in files}
