"""The plan of a run: what follows from settings and data. Dry run, preflight, trainer and model card read it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..checkpointing._checkpoint import Checkpoints
from ..data._queries import QueryTable
from ..errors import SettingsError
from ..judge import Totals
from ..judge.config import BudgetConfig
from ..rewards._method import RewardMethod
from ..store._places import LIVE_STORE, SAVED, read_store
from ..store._spending import Spending
from ._batches import Batches
from ._config import RankBufferConfig
from ._reward_functions import check_function_arguments, load_functions


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


def spent_before(output_dir: str | Path, store: str | Path | None) -> Totals:
    """Return what the judge has taken in a folder, and at least what the ledger of a store or a checkpoint has."""
    spending = Spending(Path(output_dir) / LIVE_STORE)
    if store is None:
        return spending.begin(None).totals
    with closing(read_store(store)) as saved:
        return spending.begin(saved).totals


def check_budget(args: BudgetConfig, output_dir: str | Path, store: str | Path | None) -> None:
    """Refuse to start when a budget of the judge is used up.

    Args:
        store (`str` or `Path`, *optional*):
            The checkpoint or the store from which the run goes on.

    Raises:
        [`SettingsError`]: naming the budget, and the file to delete for a new count.
    """
    # A budget is looked at after a step, which would be paid for.
    if args.has_budget and (cause := args.over_budget(spent_before(output_dir, store))):
        file = (Path(output_dir) / LIVE_STORE).with_suffix(".spent")
        count = f"count the ledger of {store} alone" if store else "count from 0"
        raise SettingsError(f"{cause}, so nothing was started: raise the budget, or delete {file} to {count}")
