"""The settings of a second judgment: its run, its data set, its judges, and the file of its result."""

from dataclasses import dataclass
from pathlib import Path

from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.settings import check_at_least, documented
from rankbuffer_trl.store.places import DUEL, report_folder

from ..batch.output import beside, same_file


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
            The run's data set, for prompts, rubrics and references. A file with other rubrics asks with these.
        dataset_config (`str`, *optional*):
            Configuration of a data set on the Hub.
        dataset_train_split (`str`, *optional*, defaults to `"train"`):
            Split of the data set.
        duels (`int`, *optional*, defaults to `200`):
            Number of duels. Each takes two questions.
        probabilities (`bool`, *optional*, defaults to `False`):
            In duels, let the probabilities of both orders together name the winner, and not the words. For
            a judge that often names the response that is shown first. Its server must give `top_logprobs`.
        control (`int`, *optional*, defaults to `200`):
            Number of first-epoch responses that are inserted again into their own buffer. 0 is no control.
        output (`str`, *optional*):
            JSON file of the result. Default: `duel.json` in `_report` in the run's folder.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the queries and responses drawn.
        dry_run (`bool`, *optional*, defaults to `False`):
            Print the estimated cost and ask nothing.
    """

    run_dir: str = ""
    dataset_name: str = ""
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    duels: int = 200
    probabilities: bool = False
    control: int = 200
    output: str | None = None
    seed: int = 0
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise SettingsError("run_dir is not set: name the output folder of a run, a checkpoint, or a store file")
        if not self.dataset_name:
            raise SettingsError("dataset_name is not set: name the data set of the run, for prompts and rubrics")
        check_at_least(self, duels=1, control=0)
        if self.output and Path(self.output).is_dir():
            raise SettingsError(f"output={self.output} is a folder: name the file of the result")
        for key in ("run_dir", "dataset_name"):
            if self.output and same_file(self.output, getattr(self, key)):
                raise SettingsError(f"output={self.output} is the file {key}, which would be lost: name another one")

    @property
    def result(self) -> Path:
        """The file of the result."""
        return Path(self.output) if self.output else report_folder(Path(self.run_dir)) / DUEL

    @property
    def log(self) -> Path:
        """The file of the answers."""
        return beside(self.result, "answers.jsonl")

    @property
    def named(self) -> str:
        """The name of the judge, without an address."""
        return self.judge_model or self.judge_client or "the embedded rubric judge"

    def queries(self) -> QueryTable:
        """Load the data set."""
        return QueryTable(load_queries(self.dataset_name, self.dataset_config, self.dataset_train_split))
