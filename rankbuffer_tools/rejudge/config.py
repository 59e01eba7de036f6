"""The settings of a second judgment: its run, its data set, its judges, and the file of its result."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig, read_object
from rankbuffer_trl.rewards.method import RewardMethod, find_method, load_method
from rankbuffer_trl.settings import changed_arguments, check_at_least, documented, fields_of
from rankbuffer_trl.store.places import DUEL, report_folder

from ..jobs.output import beside, same_file


@documented
@dataclass
class RejudgeConfig(JudgeConfig):
    r"""
    Configuration of a second judgment.

    It adds the parameters below to those of [`JudgeConfig`].

    Parameters:
        run_dir (`str`):
            Output folder of a run, one of its checkpoints, or a store file.
        dataset_name (`str`):
            The run's data set, for prompts, rubrics and references. A file with other rubrics replays with these.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        mode (`str`, *optional*, defaults to `"replay"`):
            `"replay"` scores recorded groups again. `"duel"` compares responses of the first and the last epoch.
        sample (`int`, *optional*, defaults to `50`):
            Number of queries to replay, drawn at random.
        epochs (`int`, *optional*):
            Number of epochs to replay, from the first one. Default: all.
        method (`str`, *optional*):
            Reward method of the replay. Default: that of the run, with its arguments.
        method_args (`dict`, *optional*):
            Arguments of the method, as JSON on the command line. If the method is the run's, they change its own.
        duels (`int`, *optional*, defaults to `200`):
            Number of duels. Each takes two questions.
        probabilities (`bool`, *optional*, defaults to `False`):
            In duels, let the probabilities of both orders together name the winner, and not the words. For
            a judge that often names the response that is shown first. Its server must give `top_logprobs`.
        control (`int`, *optional*, defaults to `200`):
            Number of first-epoch responses that are inserted again into their own buffer. 0 is no control.
        output (`str`, *optional*):
            JSON file of the result. Default: `rejudge.json` or `duel.json` in `_report` in the run's folder.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries and responses drawn.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print the estimated cost and ask nothing.
    """

    run_dir: str = ""
    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    mode: Literal["replay", "duel"] = "replay"
    sample: int = 50
    epochs: int | None = None
    method: str | None = None
    method_args: dict | str | None = None
    duels: int = 200
    probabilities: bool = False
    control: int = 200
    output: str | None = None
    seed: int = 0
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.method_args = read_object("method_args", self.method_args)
        if not self.run_dir:
            raise SettingsError("run_dir is not set: name the output folder of a run, a checkpoint, or a store file")
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name the data set of the run, for prompts and rubrics")
        check_at_least(self, sample=1, epochs=1, duels=1, control=0)
        if self.output and Path(self.output).is_dir():
            raise SettingsError(f"output={self.output} is a folder: name the file of the result")
        for key in ("run_dir", "dataset_name"):
            if self.output and same_file(self.output, getattr(self, key)):
                raise SettingsError(f"output={self.output} is the file {key}, which would be lost: name another one")

    @property
    def result(self) -> Path:
        """The file of the result."""
        name = {"duel": DUEL, "replay": "rejudge.json"}[self.mode]
        return Path(self.output) if self.output else report_folder(Path(self.run_dir)) / name

    @property
    def log(self) -> Path:
        """The file of the answers."""
        return beside(self.result, "answers.jsonl")

    @property
    def named(self) -> str:
        """The name of the judge, without an address."""
        return named(self)

    def queries(self, responses_needed: int = 0) -> QueryTable:
        """Load the data set."""
        rows = load_queries(self.dataset_name, self.dataset_config, self.dataset_train_split)
        return QueryTable(rows, responses_needed)

    def reward_method(self, manifest: Mapping[str, Any]) -> tuple[str, RewardMethod]:
        """Return the method of the replay and its name in a recipe.

        Raises:
            [`SettingsError`]: if neither the settings nor the run's manifest name one, or if the manifest alone names
                code outside this package: the run may be a stranger's.
        """
        arguments = read_object("method_args", self.method_args) or {}
        name = self.method or manifest.get("method")
        if name is None:
            raise SettingsError(
                f"{self.run_dir} has no checkpoint that names its reward method: set method and method_args"
            )
        if self.method is None and "." in str(name):
            raise SettingsError(
                f"{self.run_dir} names the reward method {name!r}, which may be a stranger's code: if you trust it,"
                f" add --method {name} to import and execute it"
            )
        if name == manifest.get("method"):
            cls, recorded = find_method(name), manifest.get("method_args", {})
            # An older version may have had arguments that this one lacks. At their defaults they say nothing.
            kept = {*fields_of(cls), *changed_arguments(cls, recorded)}  # type: ignore[arg-type]
            arguments = {key: value for key, value in recorded.items() if key in kept} | arguments
        return name, load_method(name, arguments, manifest.get("config", {}).get("seed", self.seed))


def named(config: JudgeConfig) -> str:
    """Return the name of a judge, without an address."""
    return config.judge_model or config.judge_client or "the embedded rubric judge"
