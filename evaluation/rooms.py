"""The benchmarks, each in its own folder.

A further benchmark needs a folder with a class that follows [`Benchmark`], its `checks` against official numbers, an
`assets.yaml`, and one line in `ROOMS`.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from .alpaca_eval.benchmark import AlpacaEval
from .alpaca_eval.validation import alpaca_eval_checks
from .arena_hard.benchmark import ArenaHard
from .arena_hard.validation import arena_hard_checks
from .assets import Assets
from .benchmark import Benchmark
from .official import Check
from .wildbench.benchmark import WildBench
from .wildbench.validation import wildbench_checks
from .writingbench.benchmark import WritingBench
from .writingbench.validation import writingbench_checks


class Room(NamedTuple):
    """What the folder of a benchmark holds.

    Args:
        benchmark (`Callable[..., Benchmark]`):
            Makes the benchmark of `assets` and `limit`.
        checks (`Callable[[Assets], Iterator[Check]]`):
            Compares the benchmark's numbers with official ones.
    """

    benchmark: Callable[..., Benchmark]
    checks: Callable[[Assets], Iterator[Check]]


ROOMS = {
    "alpaca_eval": Room(AlpacaEval, alpaca_eval_checks),
    "arena_hard": Room(ArenaHard, arena_hard_checks),
    "wildbench": Room(WildBench, wildbench_checks),
    "writingbench": Room(WritingBench, writingbench_checks),
}
"""By the name that settings, folders and results use."""
