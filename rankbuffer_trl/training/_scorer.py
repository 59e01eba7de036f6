"""The scorer of a run: the event loop that its steps run on, on the process that owns judge and store."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .._debiasing import Debiasing
from .._step import Scoring, Step
from ..checkpointing._distributed import StepLeft
from ..errors import SettingsError
from ..groups import RolloutGroup
from ..judge import Call, Judge
from ..judge._ledger import REFERENCE
from ..rewards._method import GroupScore, RewardMethod
from ..store import BufferStore
from ..store._places import LIVE_STORE
from ._config import RankBufferConfig


class StepScore(NamedTuple):
    """The outcome of one generation step."""

    scores: Sequence[GroupScore]  # one per group, in the order given
    calls: list[Call]
    seconds: float  # that the trainer waited, for the buffers, the judge and the commit
    hidden: float = 0.0  # share of `calls`, in 0..1, that had ended before the trainer asked for the scores


@dataclass(eq=False, repr=False)
class GroupScorer(Scoring):
    """The one scorer of a run, on its main process. It runs one [`Step`] at a time on an event loop of its own.

    Args:
        may_leave (`Callable[[int], bool]`, *optional*):
            Tells whether a training step with this number may be left before its end, after `leave_step`. The other
            arguments are those of [`Scoring`].
    """

    may_leave: Callable[[int], bool] = lambda step: False

    def __post_init__(self) -> None:
        self._leave_requested = asyncio.Event()  # whether to leave the step
        self._begun: Step | None = None
        self._seconds = 0.0  # that `begin` took
        self._loop = asyncio.new_event_loop()
        # The loop has its own thread. One connection pool then lives through the run, also in a notebook, which
        # has a running loop already, and Ctrl-C is not blocked.
        threading.Thread(target=self._loop.run_forever, name="judge", daemon=True).start()

    def begin(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> None:
        """Announce the rollouts of a generation step, before they are generated.

        Their texts come one by one through `arrived`. What `score` returns and records is the same with and without
        `begin`.

        Args:
            groups (`Sequence[RolloutGroup]`):
                The groups, whose rollouts have any text that is not empty ([`PENDING`]) until they arrive.
            update (`bool`, *optional*, defaults to `True`):
                Whether `score` will record the step, as in training.

        Raises:
            [`StepLeft`]: if `leave_step` was called, and the step may be left.
        """
        self.discard()
        if update and self._leave_requested.is_set() and self.may_leave(step):
            raise StepLeft
        started = time.perf_counter()
        begun = Step(self, groups, step, update)
        self.run(begun.start())
        self._begun, self._seconds = begun, time.perf_counter() - started

    def arrived(self, row: int, text: str) -> None:
        """Hand over the answer of a rollout as soon as it is generated. Any thread may call this.

        Args:
            row (`int`):
                The number of the rollout in the generation, group by group: `G * group + rollout.id`.
            text (`str`):
                The answer alone. It is empty if there is none.
        """
        if begun := self._begun:
            self._loop.call_soon_threadsafe(begun.arrivals.put_nowait, (row, text))

    def score(self, groups: Sequence[RolloutGroup], step: int, update: bool = True) -> StepScore:
        """Score all groups of one generation step, concurrently. With `update=False` only the ledger is written.

        Raises:
            [`JudgeError`]: if the share of failed judgments is above `max_failures`, as soon as that is certain, or if
            the step takes longer than `step_timeout`.
            [`StepLeft`]: if `leave_step` was called, and the step may be left.
        """
        if self._begun is None or not self._begun.fits(groups, step, update):
            self.begin(groups, step, update)
        begun, started = self._begun, time.perf_counter()
        assert begun is not None
        try:
            scores = self.run_in_step(begun.finish(groups))
        except BaseException:
            self.discard()  # its calls are recorded, but none of its groups
            raise
        self._begun = None
        corrected, calls = begun.commit(scores)
        hidden = begun.hidden / len(calls) if calls else 0.0
        return StepScore(corrected, calls, self._seconds + time.perf_counter() - started, hidden)

    def discard(self) -> None:
        """Give up a step that was begun and not scored: cancel its requests and record its calls."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self.run(begun.cancel())
            begun.commit()

    def leave_step(self, leave: bool = True) -> None:
        """Let training steps end with [`StepLeft`] instead of waiting, from now on. A signal handler may call this.

        Args:
            leave (`bool`, *optional*, defaults to `True`):
                `False` lets them wait again, for the next run.
        """
        if leave:
            self._loop.call_soon_threadsafe(self._leave_requested.set)  # the loop alone wakes what waits
        else:
            self._leave_requested.clear()

    def run_in_step(self, coroutine: Coroutine) -> Any:
        """Run a coroutine of the step that was begun. `leave_step` cancels it if the step may be left."""
        begun = self._begun
        leavable = begun is not None and begun.update and self.may_leave(begun.number)
        return self.run(self._unless_left(coroutine) if leavable else coroutine)

    async def _unless_left(self, coroutine: Coroutine) -> Any:
        work, leave = asyncio.ensure_future(coroutine), asyncio.ensure_future(self._leave_requested.wait())
        try:
            await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise StepLeft
            return work.result()
        finally:
            work.cancel()
            leave.cancel()
            await asyncio.gather(work, leave, return_exceptions=True)

    @property
    def judges(self) -> list[Judge]:
        return [self.judge, *([self.debiasing.reference_judge] if self.debiasing else [])]

    def run(self, coroutine: Coroutine) -> Any:
        """Run a coroutine on the judge's event loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # also at Ctrl-C, so that no request goes on
            raise

    def close(self) -> None:
        """Close the judge's connections, the loop and the store."""
        self.discard()
        for judge in self.judges:
            self.run(judge.client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.store.close()


def open_scorer(
    args: RankBufferConfig,
    judge: Judge | None = None,
    method: RewardMethod | None = None,
    may_leave: Callable[[int], bool] = lambda step: False,
    reference_judge: Judge | None = None,
) -> GroupScorer:
    """Open the scorer of a run: its reward method, its judges and the store in its folder.

    `may_leave` is that of [`GroupScorer`]. `reference_judge` is the second judge. Default: the one of `args`.

    Raises:
        [`SettingsError`]: if the judge that was given asks in another way than the settings say.
    """
    if judge is not None and judge.guard != args.judge_guard:
        raise SettingsError(
            f"the judge was made with guard={judge.guard}, but judge_guard is {args.judge_guard}: give both one value"
        )
    store, second = BufferStore(Path(args.output_dir) / LIVE_STORE), reference_judge or args.make_reference_judge()
    limits, first = (args.judge_max_failures, args.judge_step_timeout), args.reference_groups
    debiasing = Debiasing(second.for_method(REFERENCE, on_spent=store.spend), first) if second else None
    return GroupScorer(method or args.reward_method(), judge or args.judge(), store, *limits, debiasing, may_leave)
