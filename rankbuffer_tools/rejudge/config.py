"""The settings of a second judgment: its run, its data set, its judges, and the file of its result."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig, read_judge, read_object
from rankbuffer_trl.rewards.method import RewardMethod, find_method, load_method
from rankbuffer_trl.settings import changed_arguments, check_at_least, documented, fields_of
from rankbuffer_trl.store.places import DUEL, report_folder

from ..jobs.output import beside, same_file
from ..report.evidence import WATCH


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
            `"watch"` lets a reader compare old and new responses while the run trains.
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
            In duels and a watch, let the probabilities of both orders together name the winner, and not the words. For
            a judge that often names the response that is shown first. Its server must give `top_logprobs`.
        control (`int`, *optional*, defaults to `200`):
            Number of first-epoch responses that are inserted again into their own buffer. 0 is no control.
        reader (`dict`, *optional*):
            Settings of the reader of a watch (`judge_url`, `judge_model` and so on), as JSON on the command line. The
            settings outside it name the judge of the run. Default: the judge of the run.
        reader_rubrics (`bool`, *optional*, defaults to `True`):
            Show the rubrics of a query to the reader. With `False` it sees the same general rubrics for all queries.
        reader_share (`float`, *optional*, defaults to `0.02`):
            What a watch may take, both judges together, as a share of the judge's tokens in the run so far.
        tolerance (`float`, *optional*, defaults to `0.1`):
            By how much the judge's share of pairs that the new response wins may exceed the reader's, in 0..1.
        false_alarm_rate (`float`, *optional*, defaults to `0.05`):
            Probability of a false alarm over the whole run, at most.
        output (`str`, *optional*):
            JSON file of the result. Default: `rejudge.json`, `duel.json` or `watch.json` in `_report` in the run's
            folder.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries and responses drawn.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print the estimated cost and ask nothing.
    """

    run_dir: str = ""
    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    mode: Literal["replay", "duel", "watch"] = "replay"
    sample: int = 50
    epochs: int | None = None
    method: str | None = None
    method_args: dict | str | None = None
    duels: int = 200
    probabilities: bool = False
    control: int = 200
    reader: dict | str | None = None
    reader_rubrics: bool = True
    reader_share: float = 0.02
    tolerance: float = 0.1
    false_alarm_rate: float = 0.05
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
        check_at_least(self, sample=1, epochs=1, duels=1, control=0, tolerance=0)
        for name in ("reader_share", "tolerance", "false_alarm_rate"):
            if not 0 < (value := getattr(self, name)) < 1 and (name, value) != ("tolerance", 0):
                raise SettingsError(f"{name} is a share between 0 and 1, got {value}")
        if self.output and Path(self.output).is_dir():
            raise SettingsError(f"output={self.output} is a folder: name the file of the result")
        for key in ("run_dir", "dataset_name"):
            if self.output and same_file(self.output, getattr(self, key)):
                raise SettingsError(f"output={self.output} is the file {key}, which would be lost: name another one")
        reader = self.judges()["reader"]
        if not (self.reader_rubrics or reader.judge_url or reader.judge_client):
            raise SettingsError("reader_rubrics is false, but the embedded judge reads nothing else: name a reader")

    @property
    def result(self) -> Path:
        """The file of the result."""
        name = {"duel": DUEL, "watch": WATCH, "replay": "rejudge.json"}[self.mode]
        return Path(self.output) if self.output else report_folder(Path(self.run_dir)) / name

    @property
    def log(self) -> Path:
        """The file of the answers."""
        return beside(self.result, "answers.jsonl")

    @property
    def named(self) -> str:
        """The name of the judge, without an address."""
        return named(self)

    def judges(self) -> dict[str, JudgeConfig]:
        """Return the judge of the run and the reader of a watch, by these names.

        Raises:
            [`SettingsError`]: if `reader` is not a mapping of settings of a judge.
        """
        own = {each.name: getattr(self, each.name) for each in fields(JudgeConfig)}
        other = read_object("reader", self.reader)
        return {"judge": JudgeConfig(**own), "reader": read_judge("reader", own if other is None else other)}

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
