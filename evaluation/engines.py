"""What generates responses: a vLLM server, or transformers in this process."""

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge import AnswerLog, Call, Chat, Judge, Usage, ask_many
from rankbuffer_trl.judge.batch import digest, progress
from rankbuffer_trl.judge.openai_client import OpenAIClient

from .asking import failures_text
from .benchmark import OutputError, Prompt
from .config import EvaluationConfig
from .serving import EngineError

ANSWER_SECONDS = 3600.0
"""A response comes in one piece, after all of its tokens."""


def request_of(config: EvaluationConfig, prompt: Prompt) -> dict[str, Any]:
    """The sampling of one response, as fields of a request to vLLM. Each prompt has a seed of its own."""
    fields: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_tokens": config.max_new_tokens,
        "seed": None if config.seed is None else seed_of(config.seed, prompt.id),
    }
    if config.chat_template_kwargs:
        fields["chat_template_kwargs"] = config.template_kwargs()
    return fields


def seed_of(seed: int, *ids: str) -> int:
    """31 bits of a hash."""
    return int.from_bytes(hashlib.sha256(" ".join([str(seed), *ids]).encode()).digest()[:4]) >> 1


class VllmEngine:
    """A vLLM server that runs.

    Args:
        url (`str`):
            Base URL, with `/v1`.
        served (`str`):
            The name of the model there.
        model (`str`):
            What it is, for the log: a response of another model does not count.
        config (`EvaluationConfig`):
            Sampling and concurrency.
    """

    def __init__(self, url: str, served: str, model: str, config: EvaluationConfig):
        self.url, self.served, self.model, self.config = url, served, model, config

    def respond(self, prompts: Sequence[Prompt], log: Path, what: str) -> dict[str, str]:
        """One response per prompt by its id; those in the log are not generated again.

        Raises:
            [`JudgeError`]: if the server is not there or its context is too small.
            [`OutputError`]: if prompts are left without a response.
        """
        client = OpenAIClient(
            self.url, self.served, timeout=ANSWER_SECONDS, concurrency=self.config.engine_concurrency
        )
        chats = {
            prompt.id: Chat("generate", prompt.id, prompt.messages, str, request_of(self.config, prompt))
            for prompt in prompts
        }
        answers = asyncio.run(ask_many(Judge(client), chats, log, what, self.model))
        if answers.failures:
            raise OutputError(
                f"{what}: {len(answers.failures)} of {len(prompts)} prompts have no response."
                f" {failures_text(answers.failures)}. The others are kept; run the same command again"
            )
        return answers.values


class TransformersEngine:
    """A model in this process. Responses depend on the seed and on how prompts share batches, not on interruptions.

    Args:
        model (`str`):
            A checkpoint or an adapter.
        adapter_of (`str`, *optional*):
            The model to which an adapter belongs.
        config (`EvaluationConfig`):
            Sampling and batch size.
    """

    def __init__(self, model: str, adapter_of: str | None, config: EvaluationConfig):
        import torch
        from transformers import AutoModelForCausalLM

        self.model, self.config = model, config
        self.tokenizer = load_tokenizer(model, adapter_of)
        self.tokenizer.padding_side = "left"
        self.network = AutoModelForCausalLM.from_pretrained(adapter_of or model, dtype="auto")
        if adapter_of:
            from peft import PeftModel

            self.network = PeftModel.from_pretrained(self.network, model)
        self.network.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def respond(self, prompts: Sequence[Prompt], log: Path, what: str) -> dict[str, str]:
        """As [`VllmEngine.respond`]. A batch of which any response is missing is generated whole."""
        keys = [
            f"{prompt.id} {digest(self.model, prompt.messages, request_of(self.config, prompt))}" for prompt in prompts
        ]
        size = self.config.engine_batch_size
        with AnswerLog(log) as answered, progress() as bar:
            task = bar.add_task(what, total=len(prompts))
            for start in range(0, len(prompts), size):
                batch, names = prompts[start : start + size], keys[start : start + size]
                if any(name not in answered for name in names):
                    for name, (text, call) in zip(names, self._generate(batch), strict=True):
                        if name not in answered:
                            answered.add(name, text, call)
                bar.advance(task, len(batch))
            return {prompt.id: answered[name] for prompt, name in zip(prompts, keys, strict=True)}

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
            ids = self.network.generate(**inputs, max_new_tokens=config.max_new_tokens, **sampling)
        width = inputs["input_ids"].shape[1]
        texts = self.tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        seconds = (time.perf_counter() - started) / len(batch)
        pad = self.tokenizer.pad_token_id
        results = []
        for prompt, mask, made, text in zip(batch, inputs["attention_mask"], ids[:, width:], texts, strict=True):
            usage = Usage(int(mask.sum()), 0, int((made != pad).sum()))
            call = Call("", "generate", prompt.id, "transformers", "parsed", 1, usage, usage, seconds)
            results.append((text, call))
        return results


def load_tokenizer(model: str, adapter_of: str | None) -> Any:
    """The tokenizer of a checkpoint, or of an adapter's model where the adapter brings none.

    Raises:
        [`EngineError`]: if there is none.
    """
    from transformers import AutoTokenizer

    faults = []
    for name in filter(None, (model, adapter_of)):
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            faults.append(f"{name}: {error}")
    raise EngineError(
        f"no tokenizer for {model!r}. It must be a checkpoint or an id on the Hub. {' '.join(faults)[:500]}"
    )
