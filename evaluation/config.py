"""Every knob of an evaluation."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge.config import JudgeConfig, read_object

from .assets import MANIFEST, Assets
from .files import read_json, write_json

BENCHMARKS = ("alpaca_eval", "arena_hard", "wildbench", "writingbench")
ENGINES = ("vllm", "transformers")
KEPT = (
    *("limit", "temperature", "top_p", "top_k", "max_new_tokens", "chat_template_kwargs", "seed"),
    *("judge_model", "judge_request", "wildbench_reward"),
)
"""What all results in one folder share."""


@dataclass
class EvaluationConfig(JudgeConfig):
    r"""
    Configuration of an evaluation. It adds the parameters below to those of [`JudgeConfig`], of which
    `judge_decoding`, `judge_free_tokens`, `judge_guard` and `judge_step_timeout` have no effect here: the benchmarks
    have prompts and verdicts of their own.

    Parameters:
        models (`list[str]`):
            What to evaluate: ids on the Hub, folders of checkpoints or of LoRA adapters, each with an optional label,
            `label=path`. The label names the model's folder and its row; by default it is the path's last part.
        benchmarks (`list[str]`, *optional*, defaults to all four):
            Some of `alpaca_eval`, `arena_hard`, `wildbench`, `writingbench`.
        assets_dir (`str`, *optional*, defaults to `"assets"`):
            Folder with the official files, see `evaluation/README.md`.
        assets_manifest (`str`, *optional*, defaults to `evaluation/assets.yaml`):
            Which files belong there, with the sha256 of each.
        output_dir (`str`, *optional*, defaults to `"runs/evaluation"`):
            Outputs, judgments and scores; a run that was killed goes on there.
        limit (`int`, *optional*):
            Take only the first so many prompts of each benchmark, in Arena-Hard of each category. For smoke runs: the
            numbers then mean nothing.
        engine (`str`, *optional*, defaults to `"vllm"`):
            What generates: `"vllm"` starts a server for each model unless `engine_url` names one, `"transformers"`
            generates in this process.
        engine_url (`str`, *optional*):
            Base URL of a vLLM server that serves the one model of `models` already.
        engine_model (`str`, *optional*):
            The name under which it does. Default: the model's path.
        engine_command (`str`, *optional*, defaults to `"vllm serve"`):
            How a server is started, such as `/opt/vllm/bin/vllm serve` for one in an environment of its own.
        engine_arguments (`list[str]`, *optional*):
            More arguments for `vllm serve`, such as `--tensor-parallel-size=8`.
        engine_batch_size (`int`, *optional*, defaults to `8`):
            Prompts at once, for `"transformers"`.
        engine_concurrency (`int`, *optional*, defaults to `128`):
            Requests in flight at once, for `"vllm"`.
        temperature (`float`, *optional*, defaults to `0.6`):
            Of generation; 0 is greedy.
        top_p (`float`, *optional*, defaults to `0.95`):
            Of generation, in 0..1.
        top_k (`int`, *optional*, defaults to `20`):
            Of generation; 0 takes all tokens.
        max_new_tokens (`int`, *optional*, defaults to `4096`):
            Tokens of a response, its thinking included.
        chat_template_kwargs (`dict`, *optional*):
            For the model's chat template, such as `{"enable_thinking": false}`.
        seed (`int`, *optional*, defaults to `0`):
            Of generation: each prompt has a seed made of this one and its id. `null` sends none.
        wildbench_reward (`bool`, *optional*, defaults to `False`):
            Whether to judge WB-Reward as well: up to three more judgments of each output, with longer prompts.
        paper_rows (`list[str]`, *optional*, defaults to `["Base", "RankBuffer"]`):
            Rows of the paper's tables to show beside the results, of `evaluation/paper_results.yaml`.
        compare_with (`str`, *optional*):
            Label of the model against which the others are compared. Default: the first of `models`.
    """

    models: list[str] = field(
        default_factory=list,
        metadata={"help": "What to evaluate: ids on the Hub, folders of checkpoints or adapters, or label=path."},
    )
    benchmarks: list[str] = field(
        default_factory=lambda: list(BENCHMARKS), metadata={"help": f"Some of {', '.join(BENCHMARKS)}."}
    )
    assets_dir: str = field(default="assets", metadata={"help": "Folder with the official files."})
    assets_manifest: str = field(
        default=str(MANIFEST), metadata={"help": "Which files belong there, with the sha256 of each."}
    )
    output_dir: str = field(default="runs/evaluation", metadata={"help": "Outputs, judgments and scores."})
    limit: int | None = field(
        default=None, metadata={"help": "Only the first so many prompts, for smoke runs: the numbers mean nothing."}
    )
    engine: str = field(
        default="vllm",
        metadata={
            "help": "What generates: 'vllm' starts a server, 'transformers' does in process.",
            "choices": ENGINES,
        },
    )
    engine_url: str | None = field(
        default=None, metadata={"help": "Base URL of a vLLM server that serves the one model already."}
    )
    engine_model: str | None = field(default=None, metadata={"help": "The name under which it does."})
    engine_command: str = field(default="vllm serve", metadata={"help": "How a vLLM server is started."})
    engine_arguments: list[str] = field(
        default_factory=list, metadata={"help": "More arguments for vllm serve, such as --tensor-parallel-size=8."}
    )
    engine_batch_size: int = field(default=8, metadata={"help": "Prompts at once, for 'transformers'."})
    engine_concurrency: int = field(default=128, metadata={"help": "Requests in flight at once, for 'vllm'."})
    temperature: float = field(default=0.6, metadata={"help": "Of generation; 0 is greedy."})
    top_p: float = field(default=0.95, metadata={"help": "Of generation, in 0..1."})
    top_k: int = field(default=20, metadata={"help": "Of generation; 0 takes all tokens."})
    max_new_tokens: int = field(default=4096, metadata={"help": "Tokens of a response, its thinking included."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": 'JSON object for the chat template, such as {"enable_thinking": false}.'}
    )
    seed: int | None = field(default=0, metadata={"help": "Of generation; null sends none."})
    wildbench_reward: bool = field(default=False, metadata={"help": "Whether to judge WB-Reward as well."})
    paper_rows: list[str] = field(
        default_factory=lambda: ["Base", "RankBuffer"], metadata={"help": "Rows of the paper's tables to show."}
    )
    compare_with: str | None = field(
        default=None, metadata={"help": "Label of the model against which the others are compared."}
    )

    def __post_init__(self):
        super().__post_init__()
        self.chat_template_kwargs = read_object("chat_template_kwargs", self.chat_template_kwargs)
        if not self.models:
            raise ValueError("models is not set: name the checkpoints to evaluate")
        labels = list(self.labelled_models())
        if unfit := [label for label in labels if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", label)]:
            raise ValueError(
                f"the label of a model names a folder and may hold letters, digits and .+-_ alone, not {unfit[0]!r}"
            )
        if len(labels) < len(self.models):
            raise ValueError(f"models has a label twice: {labels}; write label=path to tell them apart")
        if unknown := set(self.benchmarks) - set(BENCHMARKS):
            raise ValueError(f"benchmarks must be some of {', '.join(BENCHMARKS)}, got {', '.join(sorted(unknown))}")
        for key in ("limit", "engine_batch_size", "engine_concurrency", "max_new_tokens"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {self.engine!r}")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                "temperature and top_k must not be below 0 and top_p must be above 0 and at most 1, got"
                f" {self.temperature}, {self.top_k} and {self.top_p}"
            )
        if self.engine_url and self.engine != "vllm":
            raise ValueError(f"engine_url names a vLLM server, and engine is {self.engine!r}: leave one of them out")
        if self.engine_url and len(self.models) > 1:
            raise ValueError(
                f"engine_url serves one model, and models names {len(self.models)}: evaluate one at a time"
            )
        if self.compare_with is not None and self.compare_with not in labels:
            raise ValueError(
                f"compare_with must be the label of a model ({', '.join(labels)}), got {self.compare_with!r}"
            )

    def template_kwargs(self) -> dict[str, Any]:
        """What prompts are rendered with."""
        return read_object("chat_template_kwargs", self.chat_template_kwargs) or {}

    def assets(self) -> Assets:
        """The official files."""
        return Assets(self.assets_dir, self.assets_manifest)

    def folder(self, label: str, benchmark: str) -> Path:
        """Where everything of one model and benchmark lies."""
        return Path(self.output_dir) / label / benchmark

    def claim_folder(self) -> None:
        """Take `output_dir` for these settings, so that results of different ones are never mixed.

        Raises:
            `ValueError`: naming what differs from the settings that the folder was made with.
        """
        path = Path(self.output_dir) / "settings.json"
        mine = {key: getattr(self, key) for key in KEPT}
        theirs = read_json(path) if path.exists() else mine
        if differ := [
            f"{key}: {theirs.get(key)!r} there, {mine[key]!r} here" for key in KEPT if theirs.get(key) != mine[key]
        ]:
            raise ValueError(
                f"{self.output_dir} holds results of other settings ({'; '.join(differ)}). Choose another output_dir"
            )
        write_json(path, mine)

    def labelled_models(self) -> dict[str, str]:
        """Path or Hub id of each model by its label, in the order given."""
        named = [name.partition("=") for name in self.models]
        return {(name if equals else Path(name).name): (path if equals else name) for name, equals, path in named}
