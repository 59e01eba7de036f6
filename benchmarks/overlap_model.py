"""Model a training step whose judge works while rollouts are generated, without a clock. `overlap.py` uses it.

The model is a discrete-event simulation of a [`Workload`]: how long the rollouts are, how fast the rollout server is,
where the judge inserts a rollout, and how many questions the judge answers at a time.

The rollout server batches continuously. In each of its steps every running sequence gains one token. A step takes
longer if more sequences run. The judge answers questions in the order in which they come. It has a number of slots,
and each question takes the same time. Generation and judge share no hardware.

A rollout that reaches the cap is cut off in its thinking. It has no answer, and it is not judged.

The orders of work are

* serial: the judge begins when the last rollout of the step is generated;
* groups: the judge begins with a group when its last rollout is generated;
* rollouts: an insertion is asked when its rollout is generated. A group's fine rankings are asked when all its
  rollouts are generated and all its insertions are answered.

The *visible* time of the judge is the time from the last rollout to the last verdict.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import NamedTuple

ORDERS = ("serial", "groups", "rollouts")


class Draw(NamedTuple):
    """A rollout before it is generated: its length in tokens, and the place where the judge will insert it."""

    tokens: int
    position: int


@dataclass(frozen=True)
class Workload:
    """The rollouts of a step and the servers that generate and judge them. Times are in seconds.

    Args:
        median (`float`, *optional*, defaults to `800`), sigma (`float`, *optional*, defaults to `0.8`):
            Median of the length of a rollout in tokens, and the deviation of its logarithm.
        cap (`int`, *optional*, defaults to `4096`):
            The longest rollout in tokens. Rollouts of this length have no answer.
        queries (`int`, *optional*, defaults to `20`), G (`int`, *optional*, defaults to `8`):
            Queries of a step, and rollouts of a query.
        K (`int`, *optional*, defaults to `6`):
            Anchors of a query.
        step_seconds (`float`, *optional*, defaults to `0.006`):
            Time of a step of the rollout server, without what each sequence adds.
        sequence_seconds (`float`, *optional*, defaults to `0.00004`):
            Time that each running sequence adds to a step of the rollout server.
        capacity (`int`, *optional*, defaults to `256`):
            Sequences that run at the same time. More of them wait.
        slots (`int`, *optional*, defaults to `16`):
            Questions that the judge answers at the same time.
    """

    median: float = 800
    sigma: float = 0.8
    cap: int = 4096
    queries: int = 20
    G: int = 8
    K: int = 6
    step_seconds: float = 0.006
    sequence_seconds: float = 0.00004
    capacity: int = 256
    slots: int = 16

    def draw(self, step: int, query: int, place: int) -> Draw:
        """Return the rollout at one place of a group.

        Three of five rollouts lie between the two best anchors. The others lie anywhere. A group without truncated
        rollouts then has 1.4 fine rankings on average, as many as in the paper's count of calls.
        """
        generator = random.Random(f"{self.median} {step} {query} {place}")
        tokens = min(self.cap, max(1, round(self.median * generator.lognormvariate(0, self.sigma))))
        position = self.K - 1 if generator.random() < 0.6 else generator.randrange(self.K + 1)
        return Draw(tokens, position)


class Batch:
    """The sequences of a server with continuous batching, at one moment.

    Every running sequence gains tokens at the same pace. So the batch counts the tokens that a sequence has gained
    that ran from the start, and a sequence ends when this count reaches a number that is known when it begins.
    """

    def __init__(self, workload: Workload, now: float = 0.0):
        self.workload = workload
        self.now = now
        self._count = 0.0
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[tuple[int, int]] = deque()

    def submit(self, sequence: int, tokens: int) -> None:
        """Add a sequence at the present moment."""
        self._waiting.append((sequence, tokens))
        self._admit()

    def next_end(self) -> float | None:
        """Return when the next sequence ends if none is added, or `None` if none runs."""
        return self.now + (self._running[0][0] - self._count) * self._pace() if self._running else None

    def advance(self, now: float) -> list[tuple[int, float]]:
        """Move to a later moment. Return the sequences that have ended and when, the first one first."""
        ended = []
        while (end := self.next_end()) is not None and end <= now:
            self.now = end
            self._count, sequence = heapq.heappop(self._running)
            ended.append((sequence, end))
            self._admit()
        if self._running:
            self._count += (now - self.now) / self._pace()
        self.now = now
        return ended

    def _pace(self) -> float:
        return self.workload.step_seconds + self.workload.sequence_seconds * len(self._running)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.workload.capacity:
            sequence, tokens = self._waiting.popleft()
            heapq.heappush(self._running, (self._count + tokens, sequence))


class Span(NamedTuple):
    """A question: the row of its rollout, or the group of its fine ranking; when it was asked, begun and answered."""

    kind: str
    place: int
    asked: float
    begun: float
    answered: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: when each rollout is generated, and what the judge was asked."""

    generated: list[float]
    questions: list[Span]

    @property
    def generation(self) -> float:
        """The seconds of generation."""
        return max(self.generated)

    @property
    def visible(self) -> float:
        """The seconds from the last rollout to the last verdict."""
        return max((span.answered for span in self.questions), default=self.generation) - self.generation


@cache
def draws_of(workload: Workload, step: int) -> tuple[Draw, ...]:
    """Return the rollouts of a step, group by group."""
    return tuple(workload.draw(step, query, place) for query in range(workload.queries) for place in range(workload.G))


@cache
def generation_times(workload: Workload, step: int) -> tuple[float, ...]:
    """Return when each rollout of a step is generated. All of them are asked for at the time 0."""
    batch = Batch(workload)
    draws = draws_of(workload, step)
    for row, draw in enumerate(draws):
        batch.submit(row, draw.tokens)
    ends = {}
    while (end := batch.next_end()) is not None:
        ends.update(batch.advance(end))
    return tuple(ends[row] for row in range(len(draws)))


def simulate(workload: Workload, step: int, latency: float, order: str) -> Timeline:
    """Simulate one step.

    Args:
        workload (`Workload`):
            Rollouts and servers.
        step (`int`):
            The number of the step, which decides the lengths and places of its rollouts.
        latency (`float`):
            Seconds that the judge takes for one question.
        order (`str`):
            One of `ORDERS`.
    """
    draws, generated = draws_of(workload, step), list(generation_times(workload, step))
    G = workload.G
    groups = [range(first, first + G) for first in range(0, len(draws), G)]
    answered = [row for row, draw in enumerate(draws) if draw.tokens < workload.cap]
    if order == "serial":
        arrivals = dict.fromkeys(range(len(draws)), max(generated))
    elif order == "groups":
        arrivals = {row: max(generated[i] for i in group) for group in groups for row in group}
    else:
        arrivals = dict(enumerate(generated))

    # An event is a rollout that the scorer gets, or an insertion that is answered. At the same moment rows count.
    events = [(time, row, False) for row, time in arrivals.items()]
    heapq.heapify(events)
    free = [0.0] * workload.slots
    spans = []

    def ask(kind: str, place: int, now: float) -> float:
        begun = max(now, heapq.heappop(free))
        heapq.heappush(free, begun + latency)
        spans.append(Span(kind, place, now, begun, begun + latency))
        return begun + latency

    # What a group still waits for: rollouts and verdicts.
    missing = [G + sum(row in group for row in answered) for group in groups]
    asked = set(answered)
    while events:
        now, row, verdict = heapq.heappop(events)
        if not verdict and row in asked:
            heapq.heappush(events, (ask("insert", row, now), row, True))
        group = row // G
        missing[group] -= 1
        if not missing[group]:
            places = Counter(draws[i].position for i in groups[group] if i in asked)
            for crowd in places.values():
                if crowd >= 2:
                    ask("fine", group, now)
    return Timeline(generated, spans)


def simulate_lists(workload: Workload, step: int, seconds: float, block: int, early: bool = True) -> Timeline:
    """Simulate one step of a method that ranks lists, each group in two random partitions into balanced blocks.

    Args:
        workload (`Workload`):
            Rollouts and servers.
        step (`int`):
            The number of the step.
        seconds (`float`):
            Seconds that the judge takes for each response of a list, because most of them go into reading it.
        block (`int`):
            Responses of a list at most. With all of a group, a list waits for the group's last rollout.
        early (`bool`, *optional*, defaults to `True`):
            Whether a list is asked when its own rollouts are generated, and not when all rollouts of the step are.
    """
    draws, generated = draws_of(workload, step), list(generation_times(workload, step))
    lists = []
    for first in range(0, len(draws), workload.G):
        for number in range(2):
            rows = list(range(first, first + workload.G))
            random.Random(f"{step} {first} {number}").shuffle(rows)  # before any length is known, as the method does
            count = -(-workload.G // block)
            for part in (rows[i::count] for i in range(count)):
                known = max(generated) if not early else max(generated[row] for row in part)
                if shown := sum(draws[row].tokens < workload.cap for row in part):
                    lists.append((known, first, shown))
    free, spans = [0.0] * workload.slots, []
    for known, first, shown in sorted(lists):
        begun = max(known, heapq.heappop(free))
        heapq.heappush(free, begun + shown * seconds)
        spans.append(Span("list", first, known, begun, begun + shown * seconds))
    return Timeline(generated, spans)


def latency_for(workload: Workload, ratio: float, steps: Iterable[int]) -> float:
    """Return the seconds of a question with which serial judging takes `ratio` times as long as generation."""
    timelines = [simulate(workload, step, 1.0, "serial") for step in steps]
    return ratio * fmean(line.generation for line in timelines) / fmean(line.visible for line in timelines)


@dataclass(frozen=True)
class Row:
    """A line of a table: means over steps.

    Args:
        generation (`float`):
            Seconds of generation.
        visible (`dict[str, float]`):
            Visible seconds of the judge by order of work.
    """

    generation: float
    visible: dict[str, float]

    def step(self, order: str) -> float:
        """Return the time of generation and judge as a multiple of generation alone."""
        return 1 + self.visible[order] / self.generation

    def share(self, order: str) -> float:
        """Return the visible time of the judge as a share of the serial one."""
        return self.visible[order] / self.visible["serial"]


def predict(workload: Workload, latency: float, steps: range) -> Row:
    """Simulate some steps in each order of work, with a judge that takes `latency` seconds for a question."""
    lines = {order: [simulate(workload, step, latency, order) for step in steps] for order in ORDERS}
    visible = {order: fmean(line.visible for line in found) for order, found in lines.items()}
    return Row(fmean(line.generation for line in lines["serial"]), visible)
