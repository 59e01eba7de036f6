"""The settings of a comparison. Those of a run are the defaults of judge and sampling."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trl import TrlParser

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.settings import check_at_least, documented
from rankbuffer_trl.store import COMPARE_FILE, DUEL_FILE, report_folder

from ..batch.output import beside, same_file
from ..batch.sampling import SamplingConfig
from ..report.runs import log_and_manifest

THOUGHTS_TOO = ("format_check", "none")  # not taken over: of two policies, one may think and the other one not
# As a run calls them, too.
SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "chat_template_kwargs", "format_check")


@documented
@dataclass
class CompareConfig(SamplingConfig, JudgeConfig):
    r"""
    Configuration of a comparison.

    It adds the parameters below to those of [`SamplingConfig`] and [`JudgeConfig`]. With two `models`, both answer the
    prompts. Without, two epochs of the run are compared by the answers in its store.

    Parameters:
        dataset_name (`str`):
            The prompts, with rubrics if there are any: for `models` best those that were kept apart, for epochs the
            run's data set. Other rubrics ask with these.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        run_dir (`str`, *optional*):
            Output folder of a run, one of its checkpoints, or a store file. What its `run.json` says is the default of
            all settings of judge and sampling, but for `judge_url` and a `format_check` of `none`. A judge of another
            name takes none of the first.
        epochs (`list[int]`, *optional*):
            The two epochs. Default: the first one, and the newest one with at least half as many queries.
        duels (`int`, *optional*, defaults to `200`):
            Number of pairs of answers. A query has one, or more if there are more duels than queries. Each pair takes
            two questions.
        probabilities (`bool`, *optional*):
            Let the probabilities of both orders together name the winner, too, and not the words alone. The judge's
            server must give `top_logprobs`. Default: true for the run's judge if its method reads them (`*_soft`).
        no_rubrics (`bool`, *optional*, defaults to `False`):
            Leave the rubrics out of the judge's prompt.
        show (`int`, *optional*, defaults to `5`):
            Number of queries whose first pair is printed side by side, whichever is better.
        output (`str`, *optional*):
            JSON file of the result. Default: `duel.json` for epochs and `compare.json` for models, in `_report` in the
            run's folder; without a run in `runs/compared`.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print the estimated cost. Ask and sample nothing.
    """

    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    run_dir: str | None = None
    epochs: list[int] | None = None
    duels: int = 200
    probabilities: bool | None = None
    no_rubrics: bool = False
    show: int = 5
    output: str | None = None
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not (self.run_dir or self.models):
            raise SettingsError(
                "run_dir is not set: name the output folder of a run, to compare two of its epochs, or two models:"
                " --models before=PATH after=PATH"
            )
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name the prompts, or the data set of the run")
        if len(self.models) not in (0, 2):
            raise SettingsError(f"models must name two, such as before=PATH after=PATH, not {len(self.models)}")
        if self.epochs is not None and (self.models or len({*self.epochs}) != 2 or len(self.epochs) != 2):
            raise SettingsError(f"epochs must be two of the run, such as 0 3, and without models; got {self.epochs}")
        if self.no_rubrics and not (self.judge_url or self.judge_client):
            raise SettingsError("no_rubrics needs a judge_url: the embedded judge reads nothing but rubrics")
        check_at_least(self, duels=1, show=0)
        if self.output and Path(self.output).is_dir():
            raise SettingsError(f"output={self.output} is a folder: name the file of the result")
        for key in ("run_dir", "dataset_name"):
            if self.output and same_file(self.output, getattr(self, key) or ""):
                raise SettingsError(f"output={self.output} is the file {key}, which would be lost: name another one")

    @property
    def result(self) -> Path:
        """The file of the result."""
        if self.output:
            return Path(self.output)
        folder = report_folder(Path(self.run_dir)) if self.run_dir else Path("runs", "compared")
        path = folder / (COMPARE_FILE if self.models else DUEL_FILE)
        return path.with_stem(f"{path.stem}_without_rubrics") if self.no_rubrics else path

    @property
    def log(self) -> Path:
        """The file of the judge's answers."""
        return beside(self.result, "answers.jsonl")

    @property
    def named(self) -> str:
        """The name of the judge, without an address."""
        return self.judge_model or self.judge_client or "the embedded rubric judge"


class CompareParser(TrlParser):
    """TRL's parser, whose defaults are the settings of the run that `run_dir` names. A file of YAML replaces them."""

    given: Mapping[str, Any] = {}

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        self.given = {**self.given, **config}  # what the file of YAML says goes before the run's settings
        return super().set_defaults_with_config(**config)

    def parse_args_into_dataclasses(self, args: Iterable[str] | None = None, **kwargs: Any) -> tuple:
        arguments, _ = self.parse_known_args(args)
        if arguments.run_dir:
            super().set_defaults_with_config(**{**inherited(arguments), **self.given})
        return super().parse_args_into_dataclasses(args, **kwargs)


def inherited(arguments: Namespace) -> dict[str, Any]:
    """Return the settings of the run that `run_dir` names, as a comparison calls them; none without a checkpoint.

    Raises:
        [`StoreError`]: if its `run.json` is damaged.
    """
    _, manifest = log_and_manifest(Path(arguments.run_dir))
    if not (run := dict[str, Any](manifest.get("config", {}))):
        return {}
    picked = {key: run[key] for key in SAMPLING_SETTINGS if key in run and (key, run[key]) != THOUGHTS_TOO}
    picked |= {"max_new_tokens": run["max_completion_length"], "engine": "vllm" if run["use_vllm"] else "transformers"}
    mine, theirs = arguments.judge_model or arguments.judge_client, run.get("judge_model") or run.get("judge_client")
    if mine is None or Path(mine).name == Path(str(theirs)).name:  # of a path, run.json has the last part
        picked |= {item.name: run[item.name] for item in fields(JudgeConfig) if item.name in run}
        picked["probabilities"] = str(manifest.get("method")).endswith("_soft")  # as its training read the judge
    return picked
