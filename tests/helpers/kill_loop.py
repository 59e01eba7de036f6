"""A program that kills a training run again and again, and compares its end with that of an undisturbed run.

    python tests/helpers/kill_loop.py FOLDER --policy POLICY --data DATA --kills 30

With `--server`, rollouts come one by one from a rollout server and verdicts from an HTTP judge, while others are still
generated. Both refuse each ninth request.

A leg of the run is a process that resumes from the newest whole checkpoint. It gets a SIGKILL at a random moment,
either at any time or within a phase that was chosen in advance. A run that reaches its end must end like the
undisturbed run. Then the next run begins, until there were enough kills.

The program prints one JSON line: the kills by phase, the torn checkpoints that were skipped, the runs and the legs.
"""

import argparse
import itertools
import json
import mmap
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import transformers.trainer
from aiohttp import web
from safetensors.torch import load_file

from helpers.checkpoints import why_torn
from helpers.fake_hub import FolderHub
from helpers.forks import LONGEST, fork, wait
from helpers.rollout_server import RolloutServer, allow_client, server_config
from helpers.scripted import config, contents
from helpers.servers import served
from rankbuffer_tools.service.judge import make_app
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.exact.manifest import checkpoints
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store.places import LIVE_STORE, read_store
from rankbuffer_trl.training.trainer import RankBufferTrainer

PHASES = ("start", "optimizer", "generation", "judging", "commit", "checkpoint", "push")
AIMED = PHASES[2:]

# Memory shared with the leg: its current phase, and for each phase the number of visits and the seconds.
shared = mmap.mmap(-1, 1 + 16 * len(PHASES))


def count_and_seconds(phase: int) -> tuple[int, float]:
    return struct.unpack_from("<qd", shared, 1 + 16 * phase)


@contextmanager
def in_phase(name: str):
    phase, outer, started = PHASES.index(name), shared[0], time.perf_counter()
    count, seconds = count_and_seconds(phase)
    struct.pack_into("<qd", shared, 1 + 16 * phase, count + 1, seconds)
    shared[0] = phase
    try:
        yield
    finally:
        shared[0] = outer
        struct.pack_into("<qd", shared, 1 + 16 * phase, count + 1, seconds + time.perf_counter() - started)


def watched(name: str, method):
    def call(*args, **kwargs):
        with in_phase(name):
            return method(*args, **kwargs)

    return call


class Hub(FolderHub):
    """A stand-in for the Hub whose pushes are a phase."""

    def upload_folder(self, **kwargs) -> Future | None:
        with in_phase("push"):
            return super().upload_folder(**kwargs)


def leg(folder: Path, arguments: argparse.Namespace) -> None:
    """Train to the end. Resume from the newest whole checkpoint, if there is one."""
    hub = Hub(folder.with_name(folder.name + "-hub"))
    transformers.trainer.hf_api = lambda: hub
    BufferStore.commit = watched("commit", BufferStore.commit)
    for method, phase in {
        "_generate_single_turn": "generation",
        "_calculate_rewards": "judging",
        "_save_checkpoint": "checkpoint",
    }.items():
        setattr(RankBufferTrainer, method, watched(phase, getattr(RankBufferTrainer, method)))
    make, more = config, {}
    if arguments.server:
        allow_client()
        rollouts, judge = (f"http://127.0.0.1:{port}" for port in arguments.ports)
        make, more = server_config, {"url": rollouts, "judge_url": f"{judge}/v1", "judge_model": "rubric-judge"}
    settings = make(
        folder,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=24,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        push_to_hub=True,
        hub_strategy="checkpoint",
        **more,
    )
    trainer = RankBufferTrainer(arguments.policy, settings, load_queries(str(arguments.data)))
    resume = any(why_torn(path) is None for _, path in checkpoints(folder))
    shared[0] = PHASES.index("optimizer")
    trainer.train(resume_from_checkpoint=resume or None)
    trainer.save_model(str(folder / "end"), _internal_call=True)
    trainer.close()


def same(folder: Path, other: Path) -> bool:
    weights, others = (load_file(path / "end" / "model.safetensors") for path in (folder, other))
    stores = [contents(path, without=("seconds", "attempts")) for path in (folder, other)]
    return stores[0] == stores[1] and all((weights[name] == others[name]).all() for name in weights)


def serve(arguments: argparse.Namespace) -> None:
    """Serve rollouts and verdicts until this process is killed."""
    texts = [text for line in arguments.data.read_text().splitlines() for text in json.loads(line)["responses"]]
    asked = itertools.count(1)

    @web.middleware
    async def refuse(request: web.Request, handler: Callable) -> web.StreamResponse:
        if request.method == "POST" and next(asked) % 9 == 0:
            return web.Response(status=503, headers={"Retry-After-Ms": "1"})
        return await handler(request)

    judge = make_app()
    judge.middlewares.append(refuse)
    rollouts = RolloutServer(arguments.policy, texts, fault=lambda number: number % 9 == 0)
    with served(rollouts.app(), arguments.ports[0]), served(judge, arguments.ports[1]):
        signal.pause()


def start(folder: Path, arguments: argparse.Namespace) -> int:
    shared[:] = bytes(len(shared))
    return fork(lambda: leg(folder, arguments), folder.with_suffix(".log"))


def kill_somewhere(pid: int, aim: str | None, chosen: random.Random, typical: dict[str, float]) -> str | None:
    """Kill a leg at any time, or within its first or second visit to a phase.

    Return the phase in which the kill fell, or `None` if the leg ended before.
    """
    if aim:
        phase, visit = PHASES.index(aim), chosen.randint(1, 2)
        ready, delay = lambda: shared[0] == phase and count_and_seconds(phase)[0] >= visit, typical[aim]
    else:
        ready, delay = lambda: shared[0] != 0, 4 * sum(typical.values())
    deadline = time.monotonic() + LONGEST
    while not ready():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert status == 0, "a leg failed; its log is beside its folder"
            return None
        assert time.monotonic() < deadline, "a leg hangs"
        time.sleep(0.0005)
    time.sleep(chosen.random() * delay)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return PHASES[shared[0]] if os.WIFSIGNALED(status) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", action="store_true")
    arguments = parser.parse_args()
    servers = []
    if arguments.server:
        with socket.socket() as first, socket.socket() as second:
            for each in (first, second):
                each.bind(("127.0.0.1", 0))
            arguments.ports = [each.getsockname()[1] for each in (first, second)]
        servers.append(fork(lambda: serve(arguments), arguments.folder.with_suffix(".servers.log")))
        while any(socket.socket().connect_ex(("127.0.0.1", port)) for port in arguments.ports):
            time.sleep(0.1)
    try:
        run(arguments)
    finally:
        for pid in servers:
            os.kill(pid, signal.SIGKILL)


def run(arguments: argparse.Namespace) -> None:
    chosen = random.Random(arguments.seed)

    reference = arguments.folder / "reference"
    reference.mkdir(parents=True)
    assert wait([start(reference, arguments)]) == [0], reference.with_suffix(".log").read_text()[-3000:]
    typical = {
        name: seconds / count for i, name in enumerate(PHASES) for count, seconds in [count_and_seconds(i)] if count
    }

    kills, torn, runs, legs = dict.fromkeys(PHASES, 0), 0, 0, 0
    folder = arguments.folder / "run-0"
    folder.mkdir()
    while True:
        enough = sum(kills.values()) >= arguments.kills and all(kills[name] for name in AIMED)
        pid = start(folder, arguments)
        legs += 1
        if enough or legs > 3 * arguments.kills:
            assert wait([pid]) == [0], folder.with_suffix(".log").read_text()[-3000:]
            phase = None
        else:
            aim = min(AIMED, key=lambda name: (kills[name], chosen.random())) if chosen.random() < 0.7 else None
            phase = kill_somewhere(pid, aim, chosen, typical)
        if phase:
            kills[phase] += 1
            torn += sum(why_torn(path) is not None for _, path in checkpoints(folder))
            if (folder / LIVE_STORE).is_file():
                read_store(folder).close()
            continue
        assert same(folder, reference), f"run {runs} did not end like the reference"
        runs += 1
        if enough or legs > 3 * arguments.kills:
            break
        folder = arguments.folder / f"run-{runs}"
        folder.mkdir()
    print(json.dumps({"kills": kills, "torn": torn, "runs": runs, "legs": legs}))


if __name__ == "__main__":
    main()
