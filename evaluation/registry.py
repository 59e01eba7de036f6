"""The paper's benchmarks, each in its own folder, and those of one's own, by dotted path."""

from inspect import isclass
from typing import Any

from rankbuffer_tools.batch.sampling import LABEL
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.settings import load_path

from .alpaca_eval.benchmark import AlpacaEval
from .arena_hard.benchmark import ArenaHard
from .benchmark import Benchmark
from .wildbench.benchmark import WildBench
from .writingbench.benchmark import WritingBench

BENCHMARKS: dict[str, Any] = {
    "alpaca_eval": AlpacaEval,
    "arena_hard": ArenaHard,
    "wildbench": WildBench,
    "writingbench": WritingBench,
}
"""The class of each benchmark of the paper, by the name that settings, folders and results use."""
# Annotations hold `name` and `title`, which have no value.
BENCHMARK_MEMBERS = [name for name in (*Benchmark.__annotations__, *vars(Benchmark)) if not name.startswith("_")]


def find_benchmark(name: str) -> Any:
    """Return the class of a benchmark: `name` is a key of [`BENCHMARKS`] or the dotted path of a class of your own.

    Raises:
        [`SettingsError`]: if there is no such class, if it lacks a member of [`Benchmark`], or if its name is taken
            or names no folder.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    try:
        benchmark = load_path(name)
    except LookupError as error:
        names = ", ".join(BENCHMARKS)
        raise SettingsError(
            f"benchmarks: there is no {name!r} ({error}): name some of {names}, or the dotted path of a class"
        ) from error
    if (
        missing := [member for member in BENCHMARK_MEMBERS if not hasattr(benchmark, member)]
        if isclass(benchmark)
        else BENCHMARK_MEMBERS
    ):
        raise SettingsError(f"benchmarks: {name} must be a class with {', '.join(missing)}")
    # Else the paper's numbers would stand beside its own.
    if benchmark.name in BENCHMARKS or not LABEL.fullmatch(str(benchmark.name)):
        raise SettingsError(
            f"benchmarks: the name of {name} is {benchmark.name!r}. It names a folder, so it may hold letters,"
            " digits and .+-_ only, and it must not be that of a benchmark of the paper"
        )
    return benchmark
