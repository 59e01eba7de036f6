"""The progress of a run in a terminal: its steps, its rewards and buffers, and the cost of its judge.

Where stderr is a file, or with `disable_tqdm`, the trainer prints its usual lines instead.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import ProgressCallback

from ..judge import Totals
from ..judge.ledger import short
from .informing import informing
from .trainer import RankBufferTrainer


class RunProgress(ProgressCallback):
    """The bar of transformers with rewards, buffers and judge behind it, and one line per epoch that stays.

    The callback of transformers prints a dictionary of all numbers at each log entry instead.

    Args:
        totals (`Callable[[], Totals]`):
            Returns the cost of the judge so far. A resumed run counts the cost before the checkpoint, too.
        price (`Callable[[Totals], float | None]`):
            Returns the price of this cost, or `None` if no prices are set.
    """

    def __init__(self, totals: Callable[[], Totals], price: Callable[[Totals], float | None]):
        super().__init__()
        self.totals, self.price = totals, price

    @informing("the progress bar")
    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the new numbers behind the bar. At the end of an epoch, print them in a line that stays."""
        if self.training_bar is None or "judge/calls" not in logs:
            return
        status = self.status(logs)
        self.training_bar.set_postfix_str(status, refresh=False)
        if state.epoch and state.epoch == int(state.epoch):
            self.training_bar.write(
                f"epoch {state.epoch:.0f}/{state.num_train_epochs}  step {state.global_step}  {status}"
            )

    def status(self, logs: dict[str, float]) -> str:
        """Format a log entry in one line."""
        totals = self.totals()
        price = self.price(totals)
        parts = [
            f"spread {logs['reward_std']:.2f}" if logs.get("reward_std") is not None else "",
            f"{logs['buffer/size']:.2f} anchors" if logs.get("buffer/size") else "",
            f"beats its last visit {gain:.0%}" if (gain := logs.get("progress/beats_last_visit")) is not None else "",
            f"waits {logs['judge/seconds']:.1f} s for the judge ({logs['judge/hidden']:.0%} hidden)",
            f"{totals.calls:,} calls",
            f"{short(totals.tokens)} tokens",
            f"{totals.failures:,} failed" if totals.failures else "",
            f"cost {price:,.2f}" if price is not None else "",
        ]
        return "  ".join(part for part in parts if part)


@contextmanager
def run_progress(trainer: RankBufferTrainer) -> Iterator[None]:
    """Let `trainer` show [`RunProgress`] in a terminal. Nothing changes elsewhere, or with `disable_tqdm`.

    Example:
        >>> with run_progress(trainer):
        ...     trainer.train()
    """
    if not sys.stderr.isatty() or trainer.args.disable_tqdm:
        yield
        return
    store = lambda: trainer.rank_reward.scorer.store  # noqa: E731  # of the main process, which alone has a bar
    shown = RunProgress(lambda: store().totals(), trainer.args.endpoint().price)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(shown)
    try:
        yield
    finally:
        if shown.training_bar:
            shown.training_bar.close()  # so that the message of an error begins a line
