"""Say how much of the judge's time hides behind generation, with your numbers.

    python benchmarks/overlap.py --judge_seconds 1.3   # the model answers at once
    python benchmarks/overlap.py --median 1500 --judge_seconds 2 --judge_slots 32 --measure   # and real clients
    python benchmarks/overlap.py --queries 5 --rollouts 64 --block 8   # lists of 8, beside lists of the whole group

Name the lengths of your rollouts, the speed of your rollout server, how long your judge takes for a question and how
many it answers at a time. `judge_throughput.py` measures a judge. The model (`overlap_model.py`) answers first.

With `--measure`, a step is also run with real clients in three orders of work:

* generation alone: TRL's `VLLMClient` asks for all rollouts with one request, and nothing is judged;
* serial: the same, and then the scorer judges all rollouts;
* overlapped: one request per rollout. The scorer gets each rollout when it is generated, as in training.

TRL's client, the judge's client, the scorer, the reward method and the SQLite store are those of a training run. Two
servers in processes of their own play the rollout server and the judge, and wait as long as they would compute; no
model runs. `--scale` shortens these waits, and the rollouts that are sent. The client's other work is not shortened:
at a scale of 0.4 it weighs 2.5 times as much as in a real step. Seconds are printed as those of a real step.

All orders see the same rollouts and get the same verdicts. The script checks that serial and overlapped steps give
the same rewards, and that their stores hold the same rows. The seconds of the calls may differ.

* `judge, s`, `overlapped, s`: the seconds that the trainer waits for the judge in a serial and in an overlapped step.
* `visible`: the second of these as a share of the first.
* `step`: the time of the whole step over that of generation alone.
* `hidden`: the share of the calls that are answered when the last rollout is generated.

Figures are medians over the turns. The script prints a table, and then one JSON line.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple
from unittest.mock import patch

import loopback
from aiohttp import web
from overlap_model import Batch, Workload, generation_times, latency_for, predict, simulate_lists
from rich.console import Console
from rich.table import Column, Table
from trl.generation.vllm_client import VLLMClient

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Judge
from rankbuffer_trl.judge.config import OpenAIClient
from rankbuffer_trl.rewards import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training import PENDING, GroupScorer, SeparateRollouts, StepScore

ANCHOR_WORDS, CANDIDATE_WORDS = 240, 400
TABLES = ("responses", "buffers", "groups", "calls")
SIMULATED = range(60)  # the steps over which the model takes its means
WORDS = "the a water heat pan rice cook stir slow well then until soft salt add cup boil drain cover minute"
FILLING = " ".join((WORDS.split() * CANDIDATE_WORDS)[:CANDIDATE_WORDS])
RUBRICS = tuple(Rubric(f"{WORDS} {weight}", weight) for weight in (5, 4, 3))


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
            unknown = tuple(Rollout(place, PENDING) for place in range(G))
            self.scorer.begin([RolloutGroup(query, unknown, step, epoch=step) for query in queries], step)
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
class Measured:
    """The serial and the overlapped steps beside generation alone, turn by turn.

    Args:
        alone (`list[float]`):
            Seconds of generation alone.
        serial (`list[Turn]`), overlapped (`list[Turn]`):
            The judged steps.
        same (`bool`):
            Whether rewards and stores agree.
    """

    alone: list[float]
    serial: list[Turn]
    overlapped: list[Turn]
    same: bool

    def seconds(self, turns: Sequence[Turn]) -> float:
        """Return the seconds that the trainer waits for the judge."""
        return median(turn.outcome.seconds for turn in turns)

    @property
    def visible(self) -> float:
        """The visible time of the judge over that of the serial judge."""
        pairs = zip(self.overlapped, self.serial, strict=True)
        return median(mine.outcome.seconds / theirs.outcome.seconds for mine, theirs in pairs)

    @property
    def hidden(self) -> float:
        """The share of the calls that are answered when the last rollout is generated."""
        return median(turn.outcome.hidden for turn in self.overlapped)

    def step(self, turns: Sequence[Turn]) -> float:
        """Return the time of steps over that of generation alone."""
        return median(turn.seconds / alone for turn, alone in zip(turns, self.alone, strict=True))


def measure(
    workload: Workload, urls: tuple[str, str], latency: float, turns: int, scale: float, folder: Path
) -> Measured:
    """Take turns with generation alone, a serial step and an overlapped step.

    Generation alone is measured once per turn on its own, and again in the serial step, which generates with the same
    call. A turn counts the median of both.
    """
    client = connect(urls[0])
    serial, overlapped = runs = [
        Run(workload, urls, scale * latency, folder / f"{overlapped}.sqlite", overlapped)
        for overlapped in (False, True)
    ]
    for run in runs:
        run.step(0)  # not counted: Python and the servers load what they need
    alone: list[float] = []
    taken: list[tuple[Turn, Turn]] = []
    for step in range(1, turns + 1):
        started = time.perf_counter()
        generate(client, workload, step)
        generation = time.perf_counter() - started
        taken.append((serial.step(step), overlapped.step(step)))
        alone.append(median([generation, taken[-1][0].seconds - taken[-1][0].outcome.seconds]))
    first, second = map(list, zip(*taken, strict=True))
    same = [turn.outcome.scores for turn in first] == [turn.outcome.scores for turn in second]
    same = same and serial.contents() == overlapped.contents()
    for run in runs:
        run.close()
    return Measured(alone, first, second, same)


def start(*servers: tuple) -> tuple[list[multiprocessing.Process], tuple[str, ...]]:
    """Start servers, each given by its function and arguments, and return their processes and addresses."""
    processes, urls = [], []
    for serve, *arguments in servers:
        port: multiprocessing.Queue = multiprocessing.Queue()
        processes.append(multiprocessing.Process(target=serve, args=(*arguments, port), daemon=True))
        processes[-1].start()
        urls.append(f"http://127.0.0.1:{port.get()}")
    return processes, tuple(urls)


def run_with_clients(workload: Workload, latency: float, turns: int, scale: float) -> Measured:
    """Start both servers, measure the steps and end the servers."""
    processes, (rollouts, judge) = start((serve_rollouts, workload, scale), (serve_judge, workload))
    try:
        with tempfile.TemporaryDirectory() as folder:
            return measure(workload, (rollouts, f"{judge}/v1"), latency, turns, scale, Path(folder))
    finally:
        for process in processes:
            process.terminate()


def parse() -> argparse.Namespace:
    """Parse the command line."""
    default = Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=default.queries, help="queries of a step")
    parser.add_argument("--rollouts", type=int, default=default.G, help="rollouts of a query")
    parser.add_argument("--anchors", type=int, default=default.K, help="anchors of a query")
    parser.add_argument("--median", type=float, default=default.median, help="median tokens of a rollout")
    parser.add_argument("--sigma", type=float, default=default.sigma, help="deviation of the logarithm of the tokens")
    parser.add_argument("--cap", type=int, default=default.cap, help="max_completion_length in tokens")
    parser.add_argument(
        "--step_seconds", type=float, default=default.step_seconds, help="a decoding step of the rollout server"
    )
    parser.add_argument(
        "--sequence_seconds",
        type=float,
        default=default.sequence_seconds,
        help="what each running sequence adds",
    )
    parser.add_argument("--capacity", type=int, default=default.capacity, help="sequences that run at the same time")
    parser.add_argument("--judge_slots", type=int, default=default.slots, help="questions judged at the same time")
    parser.add_argument(
        "--judge_seconds", type=float, help="seconds of a question (default: judging takes half as long as generation)"
    )
    own = "model lists of so many rollouts, and of whole groups; judge_seconds is then that of a list of 8"
    parser.add_argument("--block", type=int, help=own)
    parser.add_argument("--measure", action="store_true", help="also run a step with real clients: minutes")
    parser.add_argument("--scale", type=float, default=0.4, help="seconds of the servers per second of a real step")
    parser.add_argument("--turns", type=int, default=1, help="number of measured turns")
    return parser.parse_args()


def compare_lists(workload: Workload, block: int, seconds: float | None) -> dict[str, dict[str, float]]:
    """Return what is visible of the judge's time for lists of a block and of whole groups, as the model says.

    Args:
        workload (`Workload`):
            Rollouts and servers.
        block (`int`):
            Responses of a list at most.
        seconds (`float`, *optional*):
            Seconds of a list of 8. Default: judging whole groups takes half as long as generation.
    """

    def visible(each: float, block: int, early: bool) -> float:
        return fmean(simulate_lists(workload, step, each, block, early).visible for step in SIMULATED)

    generation = fmean(max(generation_times(workload, step)) for step in SIMULATED)
    each = seconds / 8 if seconds else 0.5 * generation / visible(1.0, workload.G, False)
    found = {}
    for size in (block, workload.G):
        late, early = (visible(each, size, when) for when in (False, True))
        found[f"lists of {size}"] = {
            "generation": generation,
            "judge": late,
            "overlapped": early,
            "visible": early / late,
        }
    return {name: {key: round(value, 3) for key, value in row.items()} for name, row in found.items()}


class Line(NamedTuple):
    """A line of the table: seconds of a real step, shares, and multiples of generation alone."""

    generation: float
    judge: float
    overlapped: float
    visible: float
    serial_step: float
    step: float
    hidden: float | None


def modelled(workload: Workload, latency: float) -> Line:
    """Return what the model predicts."""
    row = predict(workload, latency, SIMULATED)
    serial, overlapped = row.visible["serial"], row.visible["rollouts"]
    return Line(
        row.generation, serial, overlapped, row.share("rollouts"), row.step("serial"), row.step("rollouts"), None
    )


def measured(found: Measured, scale: float) -> Line:
    """Return what was measured with real clients."""
    seconds = median(found.alone), found.seconds(found.serial), found.seconds(found.overlapped)
    steps = found.step(found.serial), found.step(found.overlapped)
    return Line(*(each / scale for each in seconds), found.visible, *steps, found.hidden)


def table_of(title: str, lines: dict[str, Line]) -> Table:
    """Return the table of lines by name."""
    columns = ("generation, s", "judge, s", "overlapped, s", "visible", "step: serial", "step: overlapped", "hidden")
    table = Table("", *(Column(column, justify="right") for column in columns), title=title)
    for name, line in lines.items():
        hidden = "" if line.hidden is None else f"{line.hidden:.0%}"
        table.add_row(name, *(f"{each:.1f}" for each in line[:3]), *(f"{each:.2f}" for each in line[3:6]), hidden)
    return table


def main() -> None:
    arguments = parse()
    workload = Workload(
        median=arguments.median,
        sigma=arguments.sigma,
        cap=arguments.cap,
        queries=arguments.queries,
        G=arguments.rollouts,
        K=arguments.anchors,
        step_seconds=arguments.step_seconds,
        sequence_seconds=arguments.sequence_seconds,
        capacity=arguments.capacity,
        slots=arguments.judge_slots,
    )
    if arguments.block:
        found = compare_lists(workload, arguments.block, arguments.judge_seconds)
        title = f"Two partitions of {workload.queries} groups of {workload.G} into lists, as modelled"
        table = Table("", *(Column(each, justify="right") for each in next(iter(found.values()))), title=title)
        for name, row in found.items():
            table.add_row(name, *(f"{value:.2f}" for value in row.values()))
        Console(width=max(Console().width, 110)).print(table)
        print(json.dumps({"benchmark": "overlap", "block": arguments.block} | found))
        return
    latency = latency_for(workload, 0.5, SIMULATED) if arguments.judge_seconds is None else arguments.judge_seconds
    lines, same = {"model": modelled(workload, latency)}, True
    if arguments.measure:
        found = run_with_clients(workload, latency, arguments.turns, arguments.scale)
        lines["measured"], same = measured(found, arguments.scale), found.same
    title = f"A judge that takes {latency:.2f} s for a question and answers {workload.slots} at a time"
    Console(width=max(Console().width, 110)).print(table_of(title, lines))
    rounded = {
        name: {key: value if value is None else round(value, 3) for key, value in line._asdict().items()}
        for name, line in lines.items()
    }
    print(json.dumps({"benchmark": "overlap", "judge_seconds": round(latency, 3), "same": same} | rounded))
    if not same:
        raise SystemExit("the serial and the overlapped steps differ")


if __name__ == "__main__":
    main()
