"""A loop that kills a training again and again, and compares each end with that of the undisturbed training.

A start is a process that resumes from the newest whole checkpoint. It gets a SIGKILL at a random moment, either at any
time or within a phase that was chosen in advance. A training that reaches its end must end like the undisturbed one.
Then the next one begins, until there were enough kills.
"""

import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers.checkpoints import why_torn
from helpers.fake_hub import FolderHub
from helpers.forks import LONGEST, fork, wait
from rankbuffer_trl.checkpointing.manifest import checkpoints
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE, read_store
from rankbuffer_trl.training._trainer import RankBufferTrainer

PHASES = {  # what is a phase; the start is that before the first one
    "start": None,
    "optimizer": (RankBufferTrainer, "train"),
    "generation": (RankBufferTrainer, "_generate_single_turn"),
    "judging": (RankBufferTrainer, "_calculate_rewards"),
    "commit": (BufferStore, "commit"),
    "checkpoint": (RankBufferTrainer, "_save_checkpoint"),
    "push": (FolderHub, "upload_folder"),
}
NAMES = list(PHASES)
AIMED = NAMES[2:]

# Memory shared with the start: its current phase, and for each phase the number of visits and the seconds.
shared = mmap.mmap(-1, 1 + 16 * len(PHASES))


def count_and_seconds(phase: int) -> tuple[int, float]:
    return struct.unpack_from("<qd", shared, 1 + 16 * phase)


@contextmanager
def in_phase(phase: int):
    outer, started = shared[0], time.perf_counter()
    count, seconds = count_and_seconds(phase)
    struct.pack_into("<qd", shared, 1 + 16 * phase, count + 1, seconds)
    shared[0] = phase
    try:
        yield
    finally:
        shared[0] = outer
        struct.pack_into("<qd", shared, 1 + 16 * phase, count + 1, seconds + time.perf_counter() - started)


def watch_phases(folder: Path) -> dict[str, Any]:
    """Tell the parent the phase of this process from now on."""
    for phase, place in enumerate(PHASES.values()):
        if place:
            patch.object(*place, in_phase(phase)(getattr(*place))).start()
    return {}


def kill_somewhere(pid: int, aim: str | None, chosen: random.Random, typical: dict[str, float]) -> str | None:
    """Kill a start at any time, or within its first or second visit to a phase.

    Return the phase in which the kill fell, or `None` if the start ended before.
    """
    if aim:
        phase, visit = NAMES.index(aim), chosen.randint(1, 2)
        ready, delay = lambda: shared[0] == phase and count_and_seconds(phase)[0] >= visit, typical[aim]
    else:
        ready, delay = lambda: shared[0] != 0, 4 * sum(typical.values())
    deadline = time.monotonic() + LONGEST
    while not ready():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, "a start failed; its log is beside its folder"
            return None
        assert time.monotonic() < deadline, "a start hangs"
        time.sleep(0.0005)
    time.sleep(chosen.random() * delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return NAMES[shared[0]] if os.WIFSIGNALED(status) else None


def kill_again(
    folder: Path, work: Callable[[Path, bool], None], same: Callable[[Path, Path], bool], least: int, seed: int
) -> dict[str, Any]:
    """Kill a training at least so many times, and in each phase. Return the kills, the ends and what was torn.

    `work` does a start in a folder, resumed or not, and `same` compares the ends in two folders.
    """

    def start(run: Path) -> int:
        shared[:] = bytes(len(shared))
        run.mkdir(exist_ok=True)
        whole = any(why_torn(path) is None for _, path in checkpoints(run))
        return fork(lambda: work(run, whole), run.with_suffix(".log"))

    chosen, reference = random.Random(seed), folder / "killed-never"
    assert wait([start(reference)]) == [0], reference.with_suffix(".log").read_text()[-3000:]
    sums = {name: count_and_seconds(NAMES.index(name)) for name in AIMED}
    typical = {name: seconds / count for name, (count, seconds) in sums.items()}
    kills, torn, runs, starts, enough = dict.fromkeys(NAMES, 0), 0, 0, 0, False
    while not enough:
        run = folder / f"killed-{runs}"
        pid, starts = start(run), starts + 1
        enough = (sum(kills.values()) >= least and all(kills[name] for name in AIMED)) or starts > 3 * least
        if enough:
            assert wait([pid]) == [0], run.with_suffix(".log").read_text()[-3000:]
        else:
            aim = min(AIMED, key=lambda name: (kills[name], chosen.random())) if chosen.random() < 0.7 else None
            if phase := kill_somewhere(pid, aim, chosen, typical):
                kills[phase] += 1
                torn += sum(why_torn(path) is not None for _, path in checkpoints(run))
                if (run / LIVE_STORE).is_file():
                    read_store(run).close()
                continue
        assert same(run, reference), f"{run} did not end like the reference"
        runs += 1
    return {"kills": kills, "torn": torn, "runs": runs, "starts": starts}
