"""A run in a terminal: how far it is, what its rewards and buffers do, what its judge costs.

Only a terminal gets it. In a file, and under `disable_tqdm`, the trainer prints as it always does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import ProgressCallback, TrainerCallback

from ..judge import Totals
from .trainer import RankBufferTrainer

HOUR = 3600.0  # seconds of steps whose pace the remaining time assumes; a step can take minutes


class StatusProgress(Progress):
    """rich's bar with a line of text under it."""

    status = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, then the text, cut where the terminal ends."""
        yield from super().get_renderables()
        if self.status:
            yield Text(self.status, no_wrap=True, overflow="ellipsis", style="dim")


class RunProgress(TrainerCallback):
    """Epoch, step, pace and remaining time in a bar; rewards, buffers and judge under it; a line that stays per epoch.

    Args:
        epochs (`float`):
            Epochs of the run.
        totals (`Callable[[], Totals]`):
            Judge costs so far. A resumed run's hold those from before.
        price (`Callable[[Totals], float | None]`):
            What they come to, `None` if nobody knows.
        console (`Console`):
            Where to draw.
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

    def on_train_begin(self, args, state, control, **kwargs):
        """Draw the bar, from where a resumed run goes on."""
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
            speed_estimate_period=HOUR,
        )
        self.bar.add_task("train", total=state.max_steps, completed=state.global_step, epoch=self._epoch(state))
        self.bar.start()

    def on_step_end(self, args, state, control, **kwargs):
        """One step further."""
        if self.bar:
            self.evaluated = 0
            self.bar.update(self.bar.task_ids[0], completed=state.global_step, epoch=self._epoch(state))

    def on_prediction_step(self, args, state, control, **kwargs):
        """An evaluation can take long."""
        if self.bar:
            self.evaluated += 1
            self.bar.status = f"evaluating, batch {self.evaluated}"

    def on_log(self, args, state, control, logs=None, **kwargs):
        """New numbers; at the end of an epoch they stay."""
        if self.bar is None or "judge/calls" not in logs:
            return
        self.bar.status = self.status(logs)
        if state.epoch and state.epoch == int(state.epoch):
            self.bar.console.print(
                f"epoch {int(state.epoch)}/{self.epochs:g}  step {state.global_step}  {self.bar.status}",
                highlight=False,
                markup=False,
            )

    def status(self, logs: dict[str, float]) -> str:
        """A log entry in a line."""
        totals = self.totals()
        price = self.price(totals)
        rate = logs["judge/calls"] / max(logs["judge/seconds"], 1e-9)
        parts = [
            f"spread {logs['reward_std']:.2f}" if logs.get("reward_std") is not None else "",
            f"{logs['buffer/size']:.2f} anchors" if logs.get("buffer/size") else "",
            f"judge {rate:,.1f} calls/s",
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
        """The bar stays as it stands last."""
        self.close()

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self.bar:
            self.bar.stop()
            self.bar = None


def short(tokens: int) -> str:
    """1234567 as 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.1f}{letter}"
    return str(tokens)


@contextmanager
def run_progress(trainer: RankBufferTrainer, console: Console | None = None) -> Iterator[None]:
    """Show how `trainer` gets on in the terminal instead of tqdm's bar, on the main process.

    Nothing changes where stdout is no terminal, under `disable_tqdm`, and on the other processes.

    Args:
        trainer (`RankBufferTrainer`):
            The trainer, before `train()`.
        console (`Console`, *optional*):
            Where to draw; stdout by default.
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
    shown = RunProgress(trainer.args.num_train_epochs, totals, trainer.args.price, console)
    trainer.add_callback(shown)
    try:
        yield
    finally:
        trainer.remove_callback(shown)
        shown.close()
