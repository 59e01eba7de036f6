"""The budgets of a judge, at the start of a run."""

from contextlib import closing
from pathlib import Path

from ..errors import SettingsError
from ..judge import Totals
from ..judge.config import BudgetConfig
from ..store._places import LIVE_STORE, read_store
from ..store._spending import Spending


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
