"""The benchmarks, each in its own folder.

A further benchmark needs a folder with a class that follows [`Benchmark`], an `assets.yaml`, and one line in `ROOMS`.
"""

from collections.abc import Callable

from .alpaca_eval.benchmark import AlpacaEval
from .arena_hard.benchmark import ArenaHard
from .benchmark import Benchmark
from .wildbench.benchmark import WildBench
from .writingbench.benchmark import WritingBench

ROOMS: dict[str, Callable[..., Benchmark]] = {
    "alpaca_eval": AlpacaEval,
    "arena_hard": ArenaHard,
    "wildbench": WildBench,
    "writingbench": WritingBench,
}
"""The class of each benchmark, by the name that settings, folders and results use."""
