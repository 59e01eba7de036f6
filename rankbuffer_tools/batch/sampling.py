"""The settings by which policies answer prompts: which ones, the engine that generates, and how it samples."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import ServersConfig, parse_object
from rankbuffer_trl.rewards import check_format
from rankbuffer_trl.settings import check_at_least, documented

LABEL = re.compile(r"[\w.+-]*\w[\w.+-]*")  # of a model or a benchmark, for which a folder is named


class Prompt(NamedTuple):
    """A chat to answer. The id is unique in its benchmark and the same in every run."""

    id: str
    messages: list[dict[str, str]]


@documented
@dataclass
class SamplingConfig(ServersConfig):
    r"""
    Configuration of policies and of how they answer.

    Parameters:
        models (`list[str]`):
            The policies: ids on the Hub, folders of checkpoints or of LoRA adapters, each with an optional label
            as `label=path`. The label names the model's folder and its row. Default: the last part of the path.
            An address, as in `label=http://127.0.0.1:8002/v1`, is a server that serves the policy under the label.
        engine (`str`, *optional*, defaults to `"vllm"`):
            The engine that generates. `"vllm"` starts a server for each model. `"transformers"` generates in this
            process.
        engine_command (`str`, *optional*, defaults to `"vllm serve"`):
            The command that starts a server, such as `/opt/vllm/bin/vllm serve` for a separate environment.
        engine_arguments (`list[str]`, *optional*):
            More arguments for `vllm serve`, such as `--tensor-parallel-size=8`.
        engine_batch_size (`int`, *optional*, defaults to `8`):
            Prompts in a batch, at least 1, for `"transformers"`.
        engine_concurrency (`int`, *optional*, defaults to `128`):
            Requests in flight at once, at least 1, for `"vllm"`.
        temperature (`float`, *optional*, defaults to `0.6`):
            Sampling temperature, at least 0; 0 is greedy.
        top_p (`float`, *optional*, defaults to `0.95`):
            Probability mass of nucleus sampling, above 0 and at most 1.
        top_k (`int`, *optional*, defaults to `20`):
            Number of likeliest tokens to sample from; 0 means all tokens.
        max_new_tokens (`int`, *optional*, defaults to `4096`):
            Maximum tokens of a response with its thinking, at least 1.
        chat_template_kwargs (`dict`, *optional*):
            Arguments of the model's chat template, such as `{"enable_thinking": false}`.
        format_check (`str`, *optional*):
            Where the answer stands in a response, as in training: `"think"`, `"none"` or a regular expression with a
            group `answer`. Default: what follows the thinking, whose tags are known for many families of models.
        seed (`int`, *optional*, defaults to `0`):
            Seed of generation. Each prompt has a seed derived from this one and its id. `null` sends none.
    """

    models: list[str] = field(default_factory=list)
    engine: Literal["vllm", "transformers"] = "vllm"
    engine_command: str = "vllm serve"
    engine_arguments: list[str] = field(default_factory=list)
    engine_batch_size: int = 8
    engine_concurrency: int = 128
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    max_new_tokens: int = 4096
    chat_template_kwargs: dict | str | None = None
    format_check: str | None = None
    seed: int | None = 0

    def __post_init__(self):
        super().__post_init__()
        self.chat_template_kwargs = parse_object("chat_template_kwargs", self.chat_template_kwargs)
        if self.format_check is not None:
            check_format(self.format_check)
        labels = list(self.labelled_models())
        if unfit := [label for label in labels if not LABEL.fullmatch(label)]:
            raise SettingsError(
                f"a model's label names a folder, so it may hold letters, digits and .+-_ only, not {unfit[0]!r}:"
                " write label=path"
            )
        if len(labels) < len(self.models):  # one folder would hold the answers of two models
            raise SettingsError(f"models has a label twice: {labels}; write label=path to tell them apart")
        check_at_least(self, engine_batch_size=1, engine_concurrency=1, max_new_tokens=1)
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise SettingsError(
                "temperature and top_k must not be below 0 and top_p must be above 0 and at most 1, got"
                f" {self.temperature}, {self.top_k} and {self.top_p}"
            )

    def template_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the model's chat template."""
        return parse_object("chat_template_kwargs", self.chat_template_kwargs) or {}

    def labelled_models(self) -> dict[str, str]:
        """Return the path or Hub id of each model by its label, in the order of `models`."""
        named = [name.partition("=") for name in self.models]
        return {(name if equals else Path(name).name): (path if equals else name) for name, equals, path in named}
