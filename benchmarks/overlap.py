"""Measure how much of the judge's time hides behind generation, with real clients and loopback servers.

    python benchmarks/overlap.py

A step generates 20 x 8 rollouts and judges them. The script compares three orders of work:

* generation alone: TRL's `VLLMClient` asks for all rollouts with one request, and nothing is judged;
* serial: the same, and then the scorer judges all rollouts;
* overlapped: one request per rollout. The scorer gets each rollout when it is generated, as in training.

TRL's client, the judge's client, the scorer, the reward method and the SQLite store are those of a training run. Two
servers in processes of their own play the rollout server and the judge. `overlap_model.py` describes the rollouts and
both servers, and predicts the same table without a clock. The servers wait as long as they would compute; no model
runs. `--scale` shortens these waits. It also shortens the rollouts that are sent, so that reading them takes the
client the same share of a step. The client's other work is not shortened, and neither are the commits to the store.
So a scale of 0.4 lets them weigh 2.5 times as much as in a real step.

All orders see the same rollouts and get the same verdicts. The script checks that serial and overlapped steps give
the same rewards. It also checks that their stores hold the same rows. The seconds of the calls may differ.

* `judge / generation`: the time of the serial judge as a share of generation, as wanted and as measured.
* `visible`: the time that the trainer waits for buffers, judge and commit. Overlapped as a share of serial.
* `step`: the time of the whole step over that of generation alone.
* `hidden`: the share of the calls that are answered when the last rollout is generated.

Generation alone is measured once per turn on its own, and again in each serial step, which generates with the same
call. A turn counts the median of these. The figures are medians over the turns. The script prints tables, and then
one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from unittest.mock import patch

import loopback
import trl
from aiohttp import web
from miniature_report import refresh
from overlap_model import RATIOS, STEPS, WORKLOADS, Batch, Row, Workload, latency_for, predict, tables
from rich.console import Console
from rich.table import Table
from simulated_judge import WORDS
from trl.generation.vllm_client import VLLMClient

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.rollouts import SeparateRollouts
from rankbuffer_trl.training.scorer import GroupScorer, StepScore

ANCHOR_WORDS, CANDIDATE_WORDS = 240, 400
TABLES = ("responses", "buffers", "groups", "calls")
GOALS = {0.5: (0.15, 1.08), 1.0: (0.25, 1.2)}  # the most of `visible` and `step`, by judge / generation
FILLING = " ".join(WORDS[i % len(WORDS)] for i in range(CANDIDATE_WORDS))
RUBRICS = tuple(Rubric(f"{' '.join(WORDS)} {weight}", weight) for weight in (5, 4, 3))


def text_of(ids: Sequence[int]) -> str:
    """Return the answer of a rollout, whose first tokens name it. A truncated rollout has none."""
    step, query, place, truncated, *_ = ids
    return "" if truncated else f"Rollout {step} {query} {place}. {FILLING}"


class RolloutServer:
    """The completions of a vLLM server: prompt and seed decide what a rollout holds and how long it takes."""

    def __init__(self, workload: Workload, scale: float):
        self.workload, self.scale = workload, scale
        self.batch = Batch(workload)
        self.ended: dict[int, asyncio.Future] = {}
        self.sequences = 0
        self.timer: asyncio.TimerHandle | None = None

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        rollouts = [
            self.generate(step, query, body["seed"] + i) for step, query in body["prompt"] for i in range(body["n"])
        ]
        return web.json_response({"choices": await asyncio.gather(*rollouts)})

    async def generate(self, step: int, query: int, place: int) -> dict:
        draw = self.workload.draw(step, query, place)
        self.sequences += 1
        ended = self.ended[self.sequences] = asyncio.get_running_loop().create_future()
        self.settle()
        self.batch.submit(self.sequences, draw.tokens)
        self.settle()
        await ended
        ids = [step, query, place, int(draw.tokens == self.workload.cap)]
        ids += [0] * (round(self.scale * draw.tokens) - len(ids))
        names = [f"token_id:{id}" for id in ids]
        logprobs = {
            "tokens": names,
            "token_logprobs": [-0.5] * len(ids),
            "top_logprobs": [{name: -0.5} for name in names],
        }
        return {"token_ids": ids, "prompt_token_ids": [step, query], "logprobs": logprobs}

    def settle(self) -> None:
        """Move the batch to the present, and wake up when the next sequence ends."""
        loop = asyncio.get_running_loop()
        for sequence, _ in self.batch.advance(loop.time() / self.scale):
            self.ended.pop(sequence).set_result(None)
        if self.timer:
            self.timer.cancel()
        end = self.batch.next_end()
        self.timer = None if end is None else loop.call_at(end * self.scale, self.settle)


def serve_rollouts(workload: Workload, scale: float, port: multiprocessing.Queue) -> None:
    server = RolloutServer(workload, scale)

    async def healthy(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy"}]})

    routes = [web.get("/health", healthy), web.get("/v1/models", healthy)]
    loopback.serve([*routes, web.post("/v1/completions", server.complete)], port)


def serve_judge(workload: Workload, port: multiprocessing.Queue) -> None:
    """Serve verdicts that depend only on the prompt. A request says how many seconds it takes in its slot."""
    slots = asyncio.Semaphore(workload.slots)

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["messages"][0]["content"]
        async with slots:
            await asyncio.sleep(body["latency"])
        rollouts = re.findall(r"Rollout (\d+) (\d+) (\d+)\.", prompt)
        if K := re.search(r"from 0 through (\d+)>", prompt):
            content = {"position": min(int(K[1]), workload.draw(*map(int, rollouts[-1])).position)}
        else:
            ids = json.loads(re.search(r'^\{"order": (.*)\}$', prompt, re.MULTILINE)[1])
            content = {"order": sorted(ids, key=lambda id: sha256(f"{id} {rollouts}".encode()).digest())}
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": json.dumps(content)},
        }
        usage = {"prompt_tokens": 2000, "completion_tokens": 8, "total_tokens": 2008}
        return web.json_response({"choices": [choice], "usage": usage})

    loopback.serve([web.post("/v1/chat/completions", chat)], port)


def connect(url: str) -> VLLMClient:
    # TRL refuses to make its client without vLLM, which only the transfer of weights needs.
    with patch("trl.generation.vllm_client.is_vllm_available", return_value=True):
        return VLLMClient(base_url=url)


def generate(client: VLLMClient | SeparateRollouts, workload: Workload, step: int) -> list[list[int]]:
    """Generate the rollouts of a step and return their tokens. The place of a rollout in its group is its seed."""
    prompts = [[step, query] for query in range(workload.queries)]
    sampling = {"max_tokens": workload.cap, "generation_kwargs": {"seed": 0}}
    return client.generate(prompts, n=workload.G, **sampling)["completion_ids"]


@dataclass(frozen=True)
class Turn:
    """A judged step.

    Args:
        seconds (`float`):
            Wall time of the step.
        cpu (`float`):
            CPU time of the client.
        outcome (`StepScore`):
            What the scorer returned.
    """

    seconds: float
    cpu: float
    outcome: StepScore


class Run:
    """A run of one order of work, with its own clients, scorer and store.

    Args:
        workload (`Workload`):
            The rollouts.
        urls (`tuple[str, str]`):
            The addresses of rollout server and judge.
        latency (`float`):
            Seconds that the judge takes for a question.
        store (`Path`):
            The file of the store.
        overlapped (`bool`):
            Whether the judge is asked while rollouts are generated.
    """

    def __init__(self, workload: Workload, urls: tuple[str, str], latency: float, store: Path, overlapped: bool):
        self.workload = workload
        judge = Judge(OpenAIClient(urls[1], "judge", request={"latency": latency}), guard=False)
        self.scorer = GroupScorer(RankBuffer(k0=workload.K), judge, BufferStore(store))
        self.client = connect(urls[0])
        self.rollouts = SeparateRollouts(self.client, self.scorer.run, self.arrived) if overlapped else None
        anchors = FILLING.split()[:ANCHOR_WORDS]
        self.responses = tuple(" ".join([f"Anchor {i}.", *anchors]) for i in range(workload.K))

    def arrived(self, row: int, ids: Sequence[int]) -> None:
        self.scorer.arrived(row, text_of(ids))

    def step(self, step: int) -> Turn:
        """Generate and judge one step. All steps have the same queries, so their buffers carry on."""
        G = self.workload.G
        queries = [
            Query(f"query {i}", [{"role": "user", "content": f"Question {i}?"}], RUBRICS, self.responses)
            for i in range(self.workload.queries)
        ]
        cpu, started = time.process_time(), time.perf_counter()
        if self.rollouts:
            self.scorer.begin(queries, G, step, epoch=step)
        texts = [text_of(ids) for ids in generate(self.rollouts or self.client, self.workload, step)]
        groups = [
            RolloutGroup(query, tuple(Rollout(place, texts[G * i + place]) for place in range(G)), step, epoch=step)
            for i, query in enumerate(queries)
        ]
        outcome = self.scorer.score(groups, step)
        return Turn(time.perf_counter() - started, time.process_time() - cpu, outcome)

    def contents(self) -> list[list[tuple]]:
        """Return the rows of the store, without the seconds of the calls."""
        store, found = self.scorer.store, []
        for table in TABLES:
            columns = [row[1] for row in store.rows(f"PRAGMA table_info({table})") if row[1] != "seconds"]
            found.append(sorted(store.rows(f"SELECT {','.join(columns)} FROM {table}")))
        return found

    def close(self) -> None:
        if self.rollouts:
            self.rollouts.close()
        self.scorer.close()


@dataclass(frozen=True)
class Pair:
    """The serial and the overlapped steps at one ratio of judge and generation, beside generation alone.

    Args:
        ratio (`float`):
            The wanted ratio.
        alone (`list[float]`):
            Seconds of generation alone, by turn.
        serial (`list[Turn]`), overlapped (`list[Turn]`):
            The judged steps, by turn.
        same (`bool`):
            Whether rewards and stores agree.
        model (`Row`):
            What the model predicts.
    """

    ratio: float
    alone: list[float]
    serial: list[Turn]
    overlapped: list[Turn]
    same: bool
    model: Row

    @property
    def judge(self) -> float:
        """The time of the serial judge over that of generation alone."""
        return median(turn.outcome.seconds / alone for turn, alone in zip(self.serial, self.alone, strict=True))

    @property
    def visible(self) -> float:
        """The visible time of the judge over that of the serial judge."""
        pairs = zip(self.overlapped, self.serial, strict=True)
        return median(mine.outcome.seconds / theirs.outcome.seconds for mine, theirs in pairs)

    def step(self, turns: Sequence[Turn]) -> float:
        """Return the time of steps over that of generation alone."""
        return median(turn.seconds / alone for turn, alone in zip(turns, self.alone, strict=True))

    def result(self) -> dict:
        """Return the figures of the JSON line."""
        found = {
            "judge": self.judge,
            "visible": self.visible,
            "visible_model": self.model.share("rollouts"),
            "serial_step": self.step(self.serial),
            "step": self.step(self.overlapped),
            "step_model": self.model.step("rollouts"),
            "hidden": median(turn.outcome.hidden for turn in self.overlapped),
        }
        return {name: round(value, 3) for name, value in found.items()} | {"same": self.same}


def measure(
    workload: Workload, urls: tuple[str, str], ratios: Sequence[float], turns: int, scale: float, folder: Path
) -> list[Pair]:
    """Take turns with generation alone and, for each ratio, with a serial and an overlapped step."""
    steps = range(1, turns + 1)
    runs: dict[tuple[float, bool], Run] = {}
    for ratio in ratios:
        latency = scale * latency_for(workload, ratio, steps)
        for overlapped in (False, True):
            store = folder / f"{workload.median:g}-{ratio:g}-{overlapped}.sqlite"
            runs[ratio, overlapped] = Run(workload, urls, latency, store, overlapped)
    client = connect(urls[0])
    for overlapped in (False, True):
        runs[ratios[0], overlapped].step(0)  # not counted: Python and the servers load what they need
    alone: list[float] = []
    found: dict[tuple[float, bool], list[Turn]] = {key: [] for key in runs}
    for step in steps:
        started = time.perf_counter()
        generate(client, workload, step)
        generations = [time.perf_counter() - started]
        for (ratio, overlapped), run in runs.items():
            turn = run.step(step)
            found[ratio, overlapped].append(turn)
            if not overlapped:
                generations.append(turn.seconds - turn.outcome.seconds)
        alone.append(median(generations))
    pairs = []
    for ratio in ratios:
        serial, overlapped = found[ratio, False], found[ratio, True]
        scores = [[turn.outcome.scores for turn in taken] for taken in (serial, overlapped)]
        same = scores[0] == scores[1] and runs[ratio, False].contents() == runs[ratio, True].contents()
        pairs.append(Pair(ratio, alone, serial, overlapped, same, predict(workload, ratio, steps)))
    for run in runs.values():
        run.close()
    return pairs


def table_of(workload: Workload, pairs: Sequence[Pair], scale: float, load: float) -> Table:
    """Return the table of one workload, with what the model predicts for the same steps."""
    where = f"{workload.title}, scale {scale:g}, {os.cpu_count()} CPU cores with a load of {load:.1f} at the start"
    seconds = f"generation alone takes {median(pairs[0].alone):.2f} s"
    table = Table(title=f"Measured, {where}: {seconds}; the model's figures are in brackets")
    columns = ("judge, s", "overlapped, s", "visible", "step: serial", "step: overlapped", "hidden", "client CPU, s")
    table.add_column("judge / generation")
    for column in (*columns, "same results"):
        table.add_column(column, justify="right")
    for pair in pairs:
        seconds = [median(turn.outcome.seconds for turn in turns) for turns in (pair.serial, pair.overlapped)]
        cpu = [median(turn.cpu for turn in turns) for turns in (pair.serial, pair.overlapped)]
        table.add_row(
            f"{pair.judge:.2f} ({pair.ratio:g})",
            *(f"{each:.2f}" for each in seconds),
            f"{pair.visible:.2f} ({pair.model.share('rollouts'):.2f})",
            f"{pair.step(pair.serial):.2f} ({pair.model.step('serial'):.2f})",
            f"{pair.step(pair.overlapped):.2f} ({pair.model.step('rollouts'):.2f})",
            f"{median(turn.outcome.hidden for turn in pair.overlapped):.0%}",
            f"{cpu[0]:.2f}, {cpu[1]:.2f}",
            "yes" if pair.same else "NO",
        )
    return table


def goals_of(pairs: Sequence[Pair]) -> dict[str, bool]:
    """Say for each ratio that has goals whether the measured figures meet them."""
    return {
        f"{pair.ratio:g}": pair.visible <= GOALS[pair.ratio][0] and pair.step(pair.overlapped) <= GOALS[pair.ratio][1]
        for pair in pairs
        if pair.ratio in GOALS
    }


def start(*servers: tuple) -> tuple[list[multiprocessing.Process], tuple[str, ...]]:
    """Start servers, each given by its function and arguments, and return their processes and addresses."""
    processes, urls = [], []
    for serve, *arguments in servers:
        port: multiprocessing.Queue = multiprocessing.Queue()
        processes.append(multiprocessing.Process(target=serve, args=(*arguments, port), daemon=True))
        processes[-1].start()
        urls.append(f"http://127.0.0.1:{port.get()}")
    return processes, tuple(urls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.4, help="seconds of the servers per second of a real step")
    parser.add_argument("--turns", type=int, default=1, help="number of turns")
    parser.add_argument("--queries", type=int, default=20, help="number of queries per step")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="times of judge over generation")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced by these and those of the model")
    arguments = parser.parse_args()
    started, load = time.perf_counter(), os.getloadavg()[0]
    workloads = [replace(workload, queries=arguments.queries) for workload in WORKLOADS]
    # All servers start before this process has threads, which a fork would not copy.
    servers = [start((serve_rollouts, each, arguments.scale), (serve_judge, each)) for each in workloads]
    result: dict = {"benchmark": "overlap", "scale": arguments.scale, "turns": arguments.turns, "same": True}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for workload, (processes, (rollouts, judge)) in zip(workloads, servers, strict=True):
            urls = (rollouts, f"{judge}/v1")
            pairs = measure(workload, urls, arguments.ratios, arguments.turns, arguments.scale, Path(folder))
            found.append(table_of(workload, pairs, arguments.scale, load))
            Console(width=130).print(found[-1])
            result[workload.title] = {f"{pair.ratio:g}": pair.result() for pair in pairs} | {"goals": goals_of(pairs)}
            result["same"] = result["same"] and all(pair.same for pair in pairs)
            for process in processes:
                process.terminate()
    if arguments.page:
        refresh(arguments.page, found + tables(range(STEPS))[0])
    print(
        f"TRL {trl.__version__}; load {os.getloadavg()[0]:.1f} at the end, after {time.perf_counter() - started:.0f} s"
    )
    print(json.dumps(result))
    if not result["same"]:
        raise SystemExit("the serial and the overlapped steps differ")


if __name__ == "__main__":
    main()
