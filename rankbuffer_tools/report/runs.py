"""Runs that a report reads, also while they train: a private copy of the store, and the trainer's log."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Required, TypedDict

from rankbuffer_trl.checkpointing.manifest import FOLDER, RUN, STATE, checkpoints, read_manifest, read_state
from rankbuffer_trl.decoding import read_json_as
from rankbuffer_trl.monitoring import buffer_size_table
from rankbuffer_trl.monitoring.progress import DuelResult, PolicyResult, Visit, comparison_of, duel_of, placements
from rankbuffer_trl.settings import is_finite
from rankbuffer_trl.store import LIVE_STORE, BufferStore, StoreError, copy_live, read_store
from rankbuffer_trl.store.history import has_calls

from .tables import StepTables, TableRow, step_tables

GENERIC = re.compile(r"train|run|out|output|checkpoint-\d+")


class RunConfig(TypedDict, total=False):
    """The settings of a run that others read from its manifest; a manifest holds all of them."""

    seed: int
    rubric_dropout: float
    judge_prompt_price: float | None
    judge_cached_price: float | None
    judge_completion_price: float | None


class RunFacts(TypedDict, total=False):
    """What the programs read of `run.json`. The keys that are not required are for people alone."""

    step: Required[int]
    config: Required[RunConfig]
    policy: str | None
    data: str | None
    method: str
    method_args: dict[str, Any]
    judge: str
    judge_guard: bool


def read_run(checkpoint: Path) -> RunFacts:
    """Return what `run.json` says of a run, checked. For errors see [`read_manifest`]."""
    read_manifest(checkpoint)
    return read_json_as(checkpoint / FOLDER / RUN, RunFacts)


@dataclass(frozen=True)
class Run:
    """One run."""

    name: str  # the shortest end of its path that no other run here has
    path: Path  # output folder, checkpoint or store file
    store: BufferStore  # a copy, so that reading it does not hold up the run
    log: list[dict] = field(default_factory=list)  # of the trainer, up to the newest checkpoint
    manifest: RunFacts | dict[str, Any] = field(default_factory=dict)  # of the newest checkpoint; empty without one
    duel: DuelResult | None = None  # of `rankbuffer-compare`, as the next one
    comparison: PolicyResult | None = None

    # What several parts of a page need is read once.
    @cached_property
    def tables(self) -> StepTables:
        """The tables of its steps."""
        return step_tables(self.store)

    @cached_property
    def growth(self) -> list[TableRow]:
        """The sizes of its buffers by epoch."""
        return buffer_size_table(self.store)

    @cached_property
    def placements(self) -> dict[str, list[Visit]]:
        """All visits of each query."""
        return placements(self.store)

    @property
    def visits(self) -> dict[str, list[Visit]]:
        """The visits whose placements can be compared, see [`visits_by_query`]."""
        return {} if has_calls(self.store, "order_only") else self.placements


@contextmanager
def open_runs(paths: Sequence[str | Path]) -> Iterator[list[Run]]:
    """Open runs in the given order, and delete their copies afterwards.

    Args:
        paths (`Sequence[str | Path]`):
            For each run its output folder, a checkpoint (saved here or pulled from the Hub), or a `.sqlite` file.

    Raises:
        [`StoreError`]: if one of them holds no store, or a store without a scored group.
    """
    folders = [Path(path) for path in paths]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="rankbuffer-report-") as scratch:
        try:
            for number, (name, path) in enumerate(zip(run_names(folders), folders, strict=True)):
                store = open_store(path, Path(scratch) / f"{number}.sqlite")
                results = duel_of(path, store), comparison_of(path, store)
                runs.append(Run(name, path, store, *log_and_manifest(path), *results))
                if store.last_step() is None:
                    raise StoreError(f"{path} has no scored group yet: call this again after the run's first step")
            yield runs
        finally:
            for run in runs:
                run.store.close()


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ, and number a path that is given twice."""
    paths_parts = [path.absolute().parts for path in paths]
    names = []
    for i, parts in enumerate(paths_parts):
        differing = [other for j, other in enumerate(paths_parts) if j != i and other != parts]
        # A name of many runs needs the folder around it.
        lengths = range(2 if GENERIC.fullmatch(parts[-1]) else 1, len(parts) + 1)
        length = next((n for n in lengths if all(other[-n:] != parts[-n:] for other in differing)), len(parts))
        earlier = paths_parts[:i].count(parts)
        names.append("/".join(parts[-length:]) + (f" ({earlier + 1})" if earlier else ""))
    return names


def open_store(path: Path, target: Path) -> BufferStore:
    """Open a copy of a live store, or that of a checkpoint. Raise [`StoreError`] if there is none."""
    place = place_of_store(path)
    return copy_live(place, target) if place.is_file() else read_store(place)


def place_of_store(path: Path) -> Path:
    """Return the file of a live store, or the folder of a checkpoint. Raise [`StoreError`] if there is neither."""
    live = path if path.is_file() else path / LIVE_STORE
    place = live if live.is_file() else path if (path / FOLDER).is_dir() else newest_finished(path)
    if place is not None:
        return place
    problem = f"is not a run, for it holds neither {LIVE_STORE} nor {FOLDER}" if path.is_dir() else "does not exist"
    raise StoreError(
        f"{path} {problem}: name the output_dir of a RankBuffer run, one of its checkpoints, or a store file"
    )


def newest_finished(path: Path) -> Path | None:
    """Return the newest checkpoint whose manifest is written."""
    # The manifest is written last.
    return next((checkpoint for _, checkpoint in checkpoints(path) if (checkpoint / FOLDER / RUN).is_file()), None)


def log_and_manifest(path: Path) -> tuple[list[dict], RunFacts | dict[str, Any]]:
    """Return the trainer's log and the manifest of a checkpoint, or of the newest one in an output folder.

    Both are empty if there is none.

    Raises:
        [`StoreError`]: if one of the two files is damaged.
    """
    # Without a manifest it is still being written.
    folder = path if (path / FOLDER / RUN).is_file() else newest_finished(path)
    if folder is None:
        return [], {}
    try:
        manifest = read_run(folder)
        state = read_state(folder) if (folder / STATE).is_file() else {}
    except ValueError as error:
        raise StoreError(f"{folder}: {error}. Move it away to report on the run without it") from None
    log = state.get("log_history", [])
    # NaN is no JSON.
    return [{key: value for key, value in entry.items() if is_finite(value)} for entry in log], manifest
