"""The settings of an evaluation."""

from dataclasses import dataclass, field
from pathlib import Path

from rankbuffer_tools.batch.sampling import SamplingConfig
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import refuse_file
from rankbuffer_trl.judge import check_url
from rankbuffer_trl.judge.config import FailureLimit
from rankbuffer_trl.settings import check_at_least, documented

from .assets import Assets
from .files import read_json, write_json
from .registry import BENCHMARKS, find_benchmark

SAMPLED = ("limit", "temperature", "top_p", "top_k", "max_new_tokens", "chat_template_kwargs", "seed")
"""Settings that all outputs in one folder share."""
REHEARSAL = "_rehearsal"
"""The folder of what the judge said of made-up outputs."""
KEPT = (*SAMPLED, "judge_model", "judge_request", "wildbench_reward")
"""Settings that all results in one folder share."""


@documented
@dataclass
class EvaluationConfig(SamplingConfig, FailureLimit):
    r"""
    Configuration of an evaluation.

    It adds the parameters below to those of [`SamplingConfig`], [`FailureLimit`] and [`ServersConfig`]. The benchmarks
    define their own prompts and verdicts.

    Parameters:
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
        engine_url (`str`, *optional*):
            Base URL of a running vLLM server for the one model in `models`, in place of one that is started.
        engine_model (`str`, *optional*):
            The name under which that server serves the model. Default: the model's path.
        wildbench_reward (`bool`, *optional*, defaults to `False`):
            Whether to judge WB-Reward as well: up to three more judgments of each output, with longer prompts.
        paper_rows (`list[str]`, *optional*, defaults to `["Base", "RankBuffer"]`):
            Rows of the paper's tables to show with the results, from `rankbuffer_tools/paper.yaml`.
        compare_with (`str`, *optional*):
            Label of the model against which the others are compared. Default: the first of `models`.
    """

    benchmarks: list[str] = field(default_factory=lambda: list(BENCHMARKS))
    assets_dir: str = "assets"
    assets_manifest: str | None = None
    output_dir: str = "runs/evaluation"
    generate_only: bool = False
    limit: int | None = None
    engine_url: str | None = None
    engine_model: str | None = None
    wildbench_reward: bool = False
    paper_rows: list[str] = field(default_factory=lambda: ["Base", "RankBuffer"])
    compare_with: str | None = None

    def __post_init__(self):
        super().__post_init__()
        if not self.models:
            raise SettingsError("models is not set: name the checkpoints to evaluate")
        for key in ("output_dir", "assets_dir"):
            refuse_file(key, getattr(self, key))
        # A benchmark that is named twice counts once.
        names = [benchmark.name for benchmark in {*map(find_benchmark, self.benchmarks)}]
        if len(names) > len({*names}):
            raise SettingsError(f"benchmarks has two classes of one name, and each names a folder: {sorted(names)}")
        check_at_least(self, limit=1)
        if self.engine_url:
            check_url("engine_url", self.engine_url)
        if self.engine_url and self.engine != "vllm":
            raise SettingsError(f"engine_url names a vLLM server, and engine is {self.engine!r}: set only one of them")
        if self.engine_url and len(self.models) > 1:
            raise SettingsError(
                f"engine_url serves one model, and models names {len(self.models)}: evaluate one at a time"
            )
        labels = self.labelled_models()
        if REHEARSAL in labels:
            raise SettingsError(f"models: {REHEARSAL} is the folder of the judge's rehearsal: take another label")
        if self.compare_with is not None and self.compare_with not in labels:
            raise SettingsError(
                f"compare_with must be the label of a model ({', '.join(labels)}), got {self.compare_with!r}"
            )

    def assets(self) -> Assets:
        """Return the official files."""
        return Assets(self.assets_dir, self.assets_manifest)

    def folder(self, label: str, benchmark: str) -> Path:
        """Return the folder of one model and one benchmark."""
        return Path(self.output_dir) / label / benchmark

    def claim_folder(self, judged: bool = False) -> None:
        """Reserve `output_dir` for these settings, so that results of different settings are never mixed.

        Args:
            judged (`bool`, *optional*, defaults to `False`):
                Whether there are judgments. Until then the settings of the judge stay free.

        Raises:
            [`SettingsError`]: naming each setting that differs from those of the folder.
        """
        path = Path(self.output_dir) / "settings.json"
        held = read_json(path) if path.exists() else {}
        mine = {key: getattr(self, key) for key in (SAMPLED if self.generate_only else KEPT)}
        theirs = mine | held
        if differ := [
            f"{key}: {theirs[key]!r} there, {value!r} here" for key, value in mine.items() if theirs[key] != value
        ]:
            raise SettingsError(
                f"{self.output_dir} holds results of other settings ({'; '.join(differ)}). Choose another output_dir"
            )
        write_json(path, {key: theirs[key] for key in (theirs if judged else (*SAMPLED, *held))})
