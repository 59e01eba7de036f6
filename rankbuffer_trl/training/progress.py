"""The progress of a run in a terminal: its steps, its rewards and buffers, and the cost of its judge.

Where stdout is a file, or with `disable_tqdm`, the trainer prints its usual lines instead.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import ProgressCallback, TrainerCallback

from ..judge import Totals
from .informing import informing
from .trainer import RankBufferTrainer

BAR = informing("the progress bar")
HOUR = 3600.0  # seconds; the remaining time assumes the pace of the last hour, since a step can take minutes


class StatusProgress(Progress):
    """A progress bar of rich with a line of text below it."""

    status = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar, then the text, which is cut at the width of the terminal."""
        yield from super().get_renderables()
        if self.status:
            yield Text(self.status, no_wrap=True, overflow="ellipsis", style="dim")


class RunProgress(TrainerCallback):
    """The callback that draws a bar with a status line, and prints one line per epoch that stays.

    The bar shows epoch, steps, elapsed time and remaining time. The status line shows rewards, buffers and judge. A
    console that is no terminal gets the lines of the epochs alone.

    Args:
        epochs (`float`):
            Number of epochs of the run.
        totals (`Callable[[], Totals]`):
            Returns the cost of the judge so far. A resumed run counts the cost before the checkpoint, too.
        price (`Callable[[Totals], float | None]`):
            Returns the price of this cost, or `None` if no prices are set.
        console (`Console`):
            The console to draw on.
    """

    def __init__(
        self,
        epochs: float,
        totals: Callable[[], Totals],
        price: Callable[[Totals], float | None],
        console: Console,
    ):
        self.epochs, self.totals, self.price, self.console = epochs, totals, price, console
        self.bar: StatusProgress | None = None
        self.evaluated = 0

    @BAR
    def on_train_begin(self, args, state, control, **kwargs):
        """Draw the bar. A resumed run starts it at its step."""
        if args and args.max_steps > 0:
            self.epochs = state.num_train_epochs
        self.bar = StatusProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
            speed_estimate_period=HOUR,
        )
        self.bar.add_task("train", total=state.max_steps, completed=state.global_step, epoch=self._epoch(state))
        self.bar.start()

    @BAR
    def on_step_end(self, args, state, control, **kwargs):
        """Move the bar one step further."""
        if self.bar:
            self.evaluated = 0
            self.bar.update(self.bar.task_ids[0], completed=state.global_step, epoch=self._epoch(state))

    @BAR
    def on_prediction_step(self, args, state, control, **kwargs):
        """Say which batch is being evaluated, since an evaluation can take long."""
        if self.bar:
            self.evaluated += 1
            self.bar.status = f"evaluating, batch {self.evaluated}"

    @BAR
    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the new numbers in the status line. At the end of an epoch, print them in a line that stays."""
        if self.bar is None or "judge/calls" not in logs:
            return
        self.bar.status = self.status(logs)
        if state.epoch and state.epoch == int(state.epoch):
            self.bar.console.print(
                f"epoch {int(state.epoch)}/{self.epochs:g}  step {state.global_step}  {self.bar.status}",
                highlight=False,
                markup=False,
                soft_wrap=True,  # one line in a file, too
            )

    def status(self, logs: dict[str, float]) -> str:
        """Format a log entry as the status line."""
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

    def _epoch(self, state) -> str:
        done = state.epoch or 0.0
        return f"{min(int(done) + 1, int(-(-self.epochs // 1)))}/{self.epochs:g}"

    def on_train_end(self, args, state, control, **kwargs):
        """Stop the bar. Its last state stays in the terminal."""
        self.close()

    @BAR
    def close(self) -> None:
        """Give the terminal back. Call it after an error, too."""
        if self.bar:
            self.bar.stop()
            self.bar = None


def short(tokens: int) -> str:
    """Format a number of tokens: 1234567 as 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f}{letter}"
    return str(tokens)


@contextmanager
def run_progress(trainer: RankBufferTrainer, console: Console | None = None) -> Iterator[None]:
    """Show the progress of `trainer` in the terminal, on the main process, instead of tqdm's bar.

    Nothing changes where stdout is no terminal or with `disable_tqdm`.

    Args:
        trainer (`RankBufferTrainer`):
            The trainer, before `train()`.
        console (`Console`, *optional*):
            The console to draw on. Default: stdout.

    Example:
        >>> with run_progress(trainer):
        ...     trainer.train()
    """
    console = console or Console()
    if not console.is_terminal or trainer.args.disable_tqdm:
        yield
        return
    trainer.remove_callback(ProgressCallback)
    if not trainer.is_world_process_zero():
        yield
        return
    totals = trainer.rank_reward.scorer.store.totals
    shown = RunProgress(trainer.args.num_train_epochs, totals, trainer.args.endpoint().price, console)
    trainer.add_callback(shown)
    try:
        yield
    finally:
        trainer.remove_callback(shown)
        shown.close()
