"""The settings of an evaluation."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import FailureLimit, parse_object
from rankbuffer_trl.judge.endpoint import check_url
from rankbuffer_trl.rewards.format import check_format
from rankbuffer_trl.settings import check_at_least, documented

from .assets import Assets
from .files import read_json, write_json
from .rooms import LABEL, ROOMS, find_room

SAMPLED = ("limit", "temperature", "top_p", "top_k", "max_new_tokens", "chat_template_kwargs", "seed")
"""Settings that all outputs in one folder share."""
KEPT = (*SAMPLED, "judge_model", "judge_request", "wildbench_reward")
"""Settings that all results in one folder share."""


@documented
@dataclass
class EvaluationConfig(FailureLimit):
    r"""
    Configuration of an evaluation.

    It adds the parameters below to those of [`FailureLimit`] and [`ServersConfig`]. The benchmarks define their own
    prompts and verdicts.

    Parameters:
        models (`list[str]`):
            Models to evaluate: ids on the Hub, folders of checkpoints or of LoRA adapters, each with an optional label
            as `label=path`. The label names the model's folder and its row. Default: the last part of the path.
        benchmarks (`list[str]`, *optional*, defaults to all four):
            Any of `alpaca_eval`, `arena_hard`, `wildbench`, `writingbench`, and dotted paths of classes of your own,
            see `evaluation/README.md`.
        assets_dir (`str`, *optional*, defaults to `"assets"`):
            Folder with the official files, see `evaluation/README.md`.
        assets_manifest (`str`, *optional*):
            A YAML file whose entries replace those of the benchmarks' own `assets.yaml`.
        output_dir (`str`, *optional*, defaults to `"runs/evaluation"`):
            Folder of outputs, judgments and scores. A run that was killed continues there.
        generate_only (`bool`, *optional*, defaults to `False`):
            Whether to stop after the responses. No judge is needed then.
        limit (`int`, *optional*):
            Use only the first `limit` prompts of each benchmark, at least 1; in Arena-Hard, of each category. This is
            for smoke tests: the numbers mean nothing.
        engine (`str`, *optional*, defaults to `"vllm"`):
            The engine that generates. `"vllm"` starts a server for each model unless `engine_url` names one.
            `"transformers"` generates in this process.
        engine_url (`str`, *optional*):
            Base URL of a running vLLM server for the one model in `models`.
        engine_model (`str`, *optional*):
            The name under which that server serves the model. Default: the model's path.
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
        wildbench_reward (`bool`, *optional*, defaults to `False`):
            Whether to judge WB-Reward as well: up to three more judgments of each output, with longer prompts.
        paper_rows (`list[str]`, *optional*, defaults to `["Base", "RankBuffer"]`):
            Rows of the paper's tables to show with the results, from `rankbuffer_tools/paper.yaml`.
        compare_with (`str`, *optional*):
            Label of the model against which the others are compared. Default: the first of `models`.
    """

    models: list[str] = field(default_factory=list)
    benchmarks: list[str] = field(default_factory=lambda: list(ROOMS))
    assets_dir: str = "assets"
    assets_manifest: str | None = None
    output_dir: str = "runs/evaluation"
    generate_only: bool = False
    limit: int | None = None
    engine: Literal["vllm", "transformers"] = "vllm"
    engine_url: str | None = None
    engine_model: str | None = None
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
    wildbench_reward: bool = False
    paper_rows: list[str] = field(default_factory=lambda: ["Base", "RankBuffer"])
    compare_with: str | None = None

    def __post_init__(self):
        super().__post_init__()
        self.chat_template_kwargs = parse_object("chat_template_kwargs", self.chat_template_kwargs)
        if not self.models:
            raise SettingsError("models is not set: name the checkpoints to evaluate")
        if self.format_check is not None:
            check_format(self.format_check)
        labels = list(self.labelled_models())
        if unfit := [label for label in labels if not LABEL.fullmatch(label)]:
            raise SettingsError(
                f"a model's label names a folder, so it may hold letters, digits and .+-_ only, not {unfit[0]!r}:"
                " write label=path"
            )
        if len(labels) < len(self.models):
            raise SettingsError(f"models has a label twice: {labels}; write label=path to tell them apart")
        names = [room.name for room in {*map(find_room, self.benchmarks)}]
        if len(names) > len({*names}):
            raise SettingsError(f"benchmarks has two classes of one name, and each names a folder: {sorted(names)}")
        check_at_least(self, limit=1, engine_batch_size=1, engine_concurrency=1, max_new_tokens=1)
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise SettingsError(
                "temperature and top_k must not be below 0 and top_p must be above 0 and at most 1, got"
                f" {self.temperature}, {self.top_k} and {self.top_p}"
            )
        if self.engine_url:
            check_url("engine_url", self.engine_url)
        if self.engine_url and self.engine != "vllm":
            raise SettingsError(f"engine_url names a vLLM server, and engine is {self.engine!r}: set only one of them")
        if self.engine_url and len(self.models) > 1:
            raise SettingsError(
                f"engine_url serves one model, and models names {len(self.models)}: evaluate one at a time"
            )
        if self.compare_with is not None and self.compare_with not in labels:
            raise SettingsError(
                f"compare_with must be the label of a model ({', '.join(labels)}), got {self.compare_with!r}"
            )

    def template_kwargs(self) -> dict[str, Any]:
        """Return the arguments of the model's chat template."""
        return parse_object("chat_template_kwargs", self.chat_template_kwargs) or {}

    def assets(self) -> Assets:
        """Return the official files."""
        return Assets(self.assets_dir, self.assets_manifest)

    def folder(self, label: str, benchmark: str) -> Path:
        """Return the folder of one model and one benchmark."""
        return Path(self.output_dir) / label / benchmark

    def claim_folder(self) -> None:
        """Reserve `output_dir` for these settings, so that results of different settings are never mixed.

        Raises:
            [`SettingsError`]: naming each setting that differs from those of the folder.
        """
        path = Path(self.output_dir) / "settings.json"
        mine = {key: getattr(self, key) for key in (SAMPLED if self.generate_only else KEPT)}
        theirs = mine | (read_json(path) if path.exists() else {})  # which lacks the judge until there are judgments
        if differ := [
            f"{key}: {theirs[key]!r} there, {value!r} here" for key, value in mine.items() if theirs[key] != value
        ]:
            raise SettingsError(
                f"{self.output_dir} holds results of other settings ({'; '.join(differ)}). Choose another output_dir"
            )
        write_json(path, theirs)

    def labelled_models(self) -> dict[str, str]:
        """Return the path or Hub id of each model by its label, in the order of `models`."""
        named = [name.partition("=") for name in self.models]
        return {(name if equals else Path(name).name): (path if equals else name) for name, equals, path in named}
