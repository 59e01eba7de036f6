"""The plan of a run: what follows from settings and data. Dry run, preflight, trainer and model card read it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from ..checkpointing._checkpoint import Checkpoints
from ..data._queries import QueryTable
from ..rewards._method import RewardMethod
from ..rewards._reward_functions import check_function_arguments, load_functions
from ..store._places import SAVED
from ._batches import Batches
from ._config import RankBufferConfig


@dataclass(frozen=True)
class RunPlan:
    """What a run does, made once and before anything is paid for."""

    args: RankBufferConfig
    method: RewardMethod
    functions: Sequence[Callable]  # those that `reward_functions` names
    weights: Sequence[float]
    queries: QueryTable
    eval_queries: QueryTable | None  # `None` if the run does not evaluate
    batches: Batches
    checkpoints: Checkpoints  # what is known of them, so that no file is read twice
    checkpoint: str | None = None  # the one to resume from
    done: int = 0  # the step of this checkpoint

    @classmethod
    def of(
        cls, args: RankBufferConfig, train_dataset: Dataset | QueryTable, eval_dataset: Dataset | QueryTable | None
    ) -> "RunPlan":
        """Plan a new run. A data set is checked, and a table that is already checked is taken as it is.

        Raises:
            [`DataError`]: if a row cannot be used, or if settings and data do not fit together.
            [`SettingsError`]: if a reward function cannot take what it is passed.
        """
        method = args.reward_method()

        def table(dataset: Dataset | QueryTable) -> QueryTable:
            return dataset if isinstance(dataset, QueryTable) else QueryTable(dataset, method.responses_needed)

        queries = table(train_dataset)
        functions, weights = load_functions(args.reward_functions)
        check_function_arguments(functions, queries.prompts.column_names)
        eval_queries = None if eval_dataset is None else table(eval_dataset)
        if eval_queries is not None:
            # It may lack a column that the other data set has.
            check_function_arguments(functions, eval_queries.prompts.column_names, "the data set to evaluate on")
        batches = Batches(args, len(queries), None if eval_queries is None else len(eval_queries))
        checkpoints = Checkpoints(args.output_dir, SAVED)
        return cls(args, method, functions, weights, queries, eval_queries, batches, checkpoints)

    @property
    def rows(self) -> Iterator[dict[str, Any]]:
        """Each `prompt` with its `query_id` and its `place`: those to train on, then those to evaluate on."""
        for table, where in ((self.queries, ""), (self.eval_queries, " of the data to evaluate on")):
            rows = () if table is None else table.prompts.select_columns(["prompt", "query_id"])
            for number, row in enumerate(rows, start=1):
                yield {**row, "place": f"row {number}{where}"}
