"""A judge in this process: a causal language model of transformers, without any server, as on a laptop or in Colab.

It is also the example of a client of one's own that imposes a verdict and gives probabilities (`docs/extending.md`).
Each token is the likeliest of those with which the answer can still become a verdict. One question is answered at a
time, so a server is faster on a GPU.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import regex
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations import is_deepspeed_zero3_enabled

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Askable, Reply, Tally, TransportError, Usage, Verdict

SYMBOL = regex.compile(r'"((?:[^"\\]|\\.)*)"|(\w+)')  # of a grammar: a quoted text, or the name of a rule
ONE = ThreadPoolExecutor(1)  # a model answers one question at a time, whichever client asks
APPLY_TEMPLATE = PreTrainedTokenizerBase.apply_chat_template
TEMPLATE_ARGUMENTS = inspect.signature(APPLY_TEMPLATE).parameters.keys() - {"tools", "documents"}
"""What is no argument of the template itself. Some break the prompt, and `truncation` cuts it off."""
Rules = dict[str, list[tuple[tuple[str, str], ...]]]


@dataclass
class TransformersJudge:
    """A model of transformers as a judge. It is loaded at the first question, in the main process alone.

    Args:
        model (`str`):
            A folder, or an id on the Hub.
        device (`str`, *optional*):
            Where the model is, such as `cpu` or `cuda:1`. Default: the process's own GPU, or the CPU.
        dtype (`str`, *optional*, defaults to `"auto"`):
            The type of its weights; `"auto"` takes that of the checkpoint.
        template (`dict`, *optional*, defaults to `{}`):
            Arguments of its chat template, such as `{"enable_thinking": false}`.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    template: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if wrong := [name for name in self.template if name in TEMPLATE_ARGUMENTS]:
            raise SettingsError(
                f"judge_client_args: template must not set {wrong[0]}, which this judge sets: remove it"
            )

    @property
    def name(self) -> str:
        """The model, for messages."""
        return f"{self.model} in this process"

    async def complete(
        self, messages: Sequence[dict[str, str]], *, question: Askable, seed: int, tally: Tally
    ) -> Reply:
        """Answer as [`~judge.ChatClient`] says. A question with a verdict gets an answer that can be that verdict.

        Raises:
            [`SettingsError`]: if the model cannot be loaded.
            [`TransportError`]: if the model's context is too short.
        """
        answer = partial(self._answer, messages, question, seed, tally)
        return await asyncio.get_running_loop().run_in_executor(ONE, answer)

    async def close(self) -> None:
        """Keep the model, which another client of this process may use."""

    def _answer(self, messages: Sequence[dict[str, str]], question: Any, seed: int, tally: Tally) -> Reply:
        # At the first question, in the main process alone.
        tokenizer, network = load(self.model, self.device, self.dtype)
        started, tally.attempts = time.perf_counter(), tally.attempts + 1
        try:
            form = dict(add_generation_prompt=True, return_dict=True, return_tensors="pt")
            prompt = tokenizer.apply_chat_template(list(messages), **form, **self.template).to(network.device)
            fields, verdict = question.fields("none", 0), getattr(question, "verdict", None)
            length, room = prompt["input_ids"].shape[1], getattr(network.config, "max_position_embeddings", 2**31)
            if length + (most := fields.get("max_tokens") or room - length) > room:
                raise TransportError(f"{self.name}: {length} + {most} tokens do not fit into its context of {room}")
            with torch.inference_mode():
                if verdict is not None:
                    return impose(tokenizer, network, prompt["input_ids"], verdict)
                drawn = sampler(fields, (fields.get("seed") or 0) + seed, network.device)
                ids = network.generate(**prompt, max_new_tokens=most, do_sample=False, logits_processor=drawn)[
                    0, length:
                ]
            return Reply(tokenizer.decode(ids, skip_special_tokens=True), Usage(length, 0, len(ids)), len(ids) == most)
        finally:
            tally.seconds += time.perf_counter() - started


def sampler(fields: Mapping[str, Any], seed: int, device: torch.device) -> LogitsProcessorList:
    """Return what makes the likeliest token a sample by `temperature`, `top_k`, `top_p`; nothing at temperature 0."""
    steps = LogitsProcessorList()
    if temperature := fields.get("temperature"):
        steps.append(TemperatureLogitsWarper(float(temperature)))
        steps += [TopKLogitsWarper(k)] if (k := fields.get("top_k") or 0) > 0 else []
        steps += [TopPLogitsWarper(p)] if (p := fields.get("top_p") or 1.0) < 1 else []
        # Its own: a training beside this draws from torch's, and resumes exactly.
        generator = torch.Generator(device).manual_seed(seed)
        # Gumbel noise makes the likeliest token a sample.
        steps.append(lambda _, scores: scores - torch.empty_like(scores).exponential_(generator=generator).log())
    return steps


@lru_cache(maxsize=1)  # the preflight and the training have a client each
def load(model: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Load a tokenizer and a model, and change no random state.

    Raises:
        [`SettingsError`]: if they cannot be loaded, or if there is no chat template.
    """
    if is_deepspeed_zero3_enabled():  # it would spread the weights over processes that never ask
        raise SettingsError("a judge in the process cannot be loaded under ZeRO-3: serve it, and set judge_url")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise SettingsError(f"judge_client_args: torch has no dtype {dtype!r}: name another one, such as bfloat16")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training, so that an audit and a run have the same judge
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with torch.random.fork_rng():  # a resumed run loads them at another step
            tokenizer, network = (
                AutoTokenizer.from_pretrained(model),
                AutoModelForCausalLM.from_pretrained(model, dtype=dtype),
            )
        network = network.eval().to(where)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last two: no such device, or no room
        cause = " ".join(str(error).split())[:300]
        raise SettingsError(f"judge_client_args: the model {model} cannot be loaded on {where}: {cause}") from error
    if not tokenizer.chat_template:
        raise SettingsError(f"judge_client_args: {model} has no chat template: take an instruction-tuned model")
    return tokenizer, network


def impose(tokenizer: Any, network: Any, ids: torch.Tensor, verdict: Verdict) -> Reply:
    """Answer a prompt with a verdict. The probabilities of all tokens that were possible come with it."""
    letters = frozenset(str(verdict.constraint))
    texts, fits = spelled_with(tokenizer, letters), reader(verdict)
    prompt, answer, places, cache = ids.shape[1], "", [], None
    while heads := {letter for letter in letters if fits(answer + letter)}:
        possible = {id: text for id, text in texts.items() if text[0] in heads and fits(answer + text)}
        out = network(ids, past_key_values=cache, use_cache=True)  # the new token alone: the cache has the rest
        # Before the form is imposed, as soft methods need them.
        logprobs, cache = out.logits[0, -1].float().log_softmax(-1), out.past_key_values
        listed = dict(zip(possible, logprobs[[*possible]].tolist(), strict=True))
        if not all(each <= 0 for each in listed.values()) or max(listed.values()) == -math.inf:
            # the first possible token would win: a reward by the number of the rollout
            raise TransportError("the judge in this process gives NaN or no probability: set its dtype to float32")
        best = max(listed, key=listed.__getitem__)
        top = [{"token": texts[id], "logprob": logprob} for id, logprob in listed.items()]
        places.append({"token": texts[best], "logprob": listed[best], "top_logprobs": top})
        answer, ids = answer + texts[best], ids.new_tensor([[best]])
    return Reply(answer, Usage(prompt, 0, len(places)), logprobs={"content": places})


@lru_cache(maxsize=256)
def spelled_with(tokenizer: Any, letters: frozenset[str]) -> dict[int, str]:
    """Return the text of each token that has these letters only, by id."""
    return {id: text for id, text in enumerate(spellings(tokenizer)) if text and letters.issuperset(text)}


@lru_cache(maxsize=1)
def spellings(tokenizer: Any) -> list[str]:
    """Return the text of each token; that of a special token is empty."""
    first = tokenizer("a", add_special_tokens=False)["input_ids"][-1]  # some tokenizers drop a leading space
    start = len(tokenizer.decode([first]))
    pairs = [[first, id] for id in range(len(tokenizer))]
    return [text[start:] for text in tokenizer.batch_decode(pairs, skip_special_tokens=True)]


def reader(verdict: Verdict) -> Callable[[str], bool]:
    """Return a function that tells whether a text can go on to a verdict, or is one."""
    ((form, text),) = verdict.constraint.items()
    if form == "regex":
        pattern = regex.compile(text)
        # `partial`: the text may still become a match.
        return lambda answer: pattern.fullmatch(answer, partial=True) is not None
    rules: Rules = {}
    for line in text.splitlines():
        name, _, right = line.partition(" ::= ")
        rules[name] = [tuple(SYMBOL.findall(option)) for option in right.split(" | ")]
    return lambda answer: begins(answer, rules["root"][0], rules)


def begins(answer: str, symbols: tuple[tuple[str, str], ...], rules: Rules) -> bool:
    """Return whether a text is the beginning of what the symbols of a grammar stand for."""
    for place, (quoted, name) in enumerate(symbols):
        if name:
            return any(begins(answer, each + symbols[place + 1 :], rules) for each in rules[name])
        literal = quoted.replace('\\"', '"')
        if not answer.startswith(literal):
            return literal.startswith(answer)
        answer = answer.removeprefix(literal)
        if not answer:
            return True
    return not answer
