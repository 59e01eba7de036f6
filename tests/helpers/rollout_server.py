"""A loopback server in the place of `vllm serve`, for TRL's real client, and the settings of a run that uses it.

What it generates depends on prompt and seed alone, so a run can be repeated with one request or with many.
"""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer
from trl.generation import vllm_client, vllm_generation
from trl.generation.vllm_client import VLLMClient

from helpers.scripted import config
from rankbuffer_trl.training._config import RankBufferConfig


class RolloutServer:
    """The endpoints of `vllm serve` that TRL uses.

    Args:
        policy (`str`):
            The folder of the tokenizer.
        texts (`list[str]`):
            The texts to sample from.
        fault (`Callable[[int], bool]`, *optional*):
            Tells whether to refuse the request with this number, from 1, with 503.
        hold (`Callable[[int], bool]`, *optional*):
            Tells whether never to answer the request with this number.
        say (`Callable[[dict], web.Response]`, *optional*):
            Makes the response of an answer, to break it.
    """

    def __init__(
        self,
        policy: str,
        texts: list[str],
        fault: Callable[[int], bool] = lambda number: False,
        hold: Callable[[int], bool] = lambda number: False,
        say: Callable[[dict[str, Any]], web.Response] = web.json_response,
        context: int | None = 4096,
    ):
        self.context = context
        tokenizer = AutoTokenizer.from_pretrained(policy)
        self.texts = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
        self.fault, self.hold, self.say = fault, hold, say
        self.seen: list[dict[str, Any]] = []
        self.in_flight = 0
        self.held = threading.Event()  # whether a request is being held
        self.idle = threading.Event()  # whether nothing is in flight after that

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self.completions)
        answers: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": self.context}]},
            "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/reset_prefix_cache": {"success": True},
        }

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(answers[request.path])

        for path in answers:
            app.router.add_route("*", path, answer)
        return app

    async def completions(self, request: web.Request) -> web.Response:
        payload = await request.json()
        self.seen.append(payload)
        number = len(self.seen)
        if self.fault(number):
            return web.Response(status=503, headers={"Retry-After-Ms": "1"})
        self.in_flight += 1
        try:
            if self.hold(number):
                self.held.set()
                await asyncio.Event().wait()
            choices = [self.choice(payload, prompt, i) for prompt in payload["prompt"] for i in range(payload["n"])]
            # Answers come in another order than requests, whatever the speed of this machine.
            for _ in range(hashlib.sha256(repr(choices).encode()).digest()[0]):
                await asyncio.sleep(0)
            return self.say({"choices": choices})
        finally:
            self.in_flight -= 1
            if self.held.is_set() and not self.in_flight:
                self.idle.set()

    def choice(self, payload: dict[str, Any], prompt: list[int], index: int) -> dict[str, Any]:
        seed = payload.get("seed", 0) + index
        digest = hashlib.sha256(f"{seed} {prompt}".encode()).digest()
        ids = self.texts[int.from_bytes(digest[:4], "big") % len(self.texts)][: payload["max_tokens"]]
        tokens, values = [f"token_id:{id}" for id in ids], [-1 - i / 100 for i in range(len(ids))]
        tops = [{token: value} for token, value in zip(tokens, values, strict=True)]
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}


def allow_client() -> None:
    """Let TRL make its client without vLLM. The transfer of weights, which is NCCL's, is left out."""
    for module in (vllm_client, vllm_generation):
        module.is_vllm_available = lambda **kwargs: True
    VLLMClient.init_communicator = lambda self, device: None
    VLLMClient.update_named_params = lambda self, metadata, params: [None for _ in params]


def server_config(output_dir: Path, url: str, **overrides: Any) -> RankBufferConfig:
    """Return the settings of a small run whose rollouts come from a server."""
    values = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": url,
        "vllm_importance_sampling_correction": False,  # the log-probabilities of the server are made up
        "generation_kwargs": {"seed": 7},
    }
    return config(output_dir, **(values | overrides))
