"""Measure how close judging a step comes to the limit of the judge server, and what it costs the client.

    python benchmarks/judge_throughput.py
    python benchmarks/judge_throughput.py --vllm_url http://127.0.0.1:8001/v1 --vllm_model judge

The script compares RankBuffer with a floor. Both judge a step of 20 queries x 8 rollouts with 6 anchors of 240 tokens
and candidates of 400 tokens. RankBuffer does all that it does in training, from groups to committed buffers. The floor
is a bare asynchronous HTTP loop at the same concurrency. It sends the same requests, encoded in advance, in the same
order (the fine rankings of a group after its insertions), and parses no answer. The two take turns

(a) on a loopback server in its own process, which answers every request after a fixed latency;
(b) with `--vllm_url`, on a real vLLM server. The server's counters tell how many prompt tokens it computed and how
    many came from its prefix cache. Each turn has its own cache salt, so no turn profits from an earlier one.

The script prints tables, and then one JSON line. `ratio` is the ratio of the median wall times of (a).
`cpu_ms_per_call` is the client's CPU time per judgment in (a). `computed_prompt_share` is the share of (b), or null.
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import loopback
from aiohttp import web
from rich.console import Console
from rich.table import Table

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Judge, constrain
from rankbuffer_trl.judge.config import OpenAIClient
from rankbuffer_trl.rewards import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training import GroupScorer

QUERIES, G, K = 20, 8, 6
ANCHOR_WORDS, CANDIDATE_WORDS = 240, 400
WORDS = "the a water heat pan rice cook stir slow well then until soft salt add cup boil drain cover minute".split()
COUNTERS = {"prompt": "vllm:prompt_tokens_total", "cached": "vllm:prefix_cache_hits_total"}


@dataclass
class Turn:
    """One step of one contender: wall and CPU seconds, requests, and the prompt tokens that the server counted."""

    wall: float
    cpu: float
    calls: int
    prompt: float = 0
    cached: float = 0


class Recorder:
    """A chat client that forwards all questions and keeps the requests, by query and kind, for the floor."""

    def __init__(self, client: OpenAIClient):
        self.client, self.name = client, client.name
        self.requests: dict[str, dict[str, list[dict]]] = defaultdict(lambda: {"insert": [], "fine": []})

    async def complete(self, messages, *, question, seed, tally):
        fields = constrain(question.verdict, self.client.decoding, self.client.free_tokens)
        request = {"model": self.client.model, "messages": list(messages), "temperature": 0, "seed": seed, **fields}
        if seed == 0:
            self.requests[question.query_id][question.kind].append(request)
        return await self.client.complete(messages, question=question, seed=seed, tally=tally)

    async def close(self):
        await self.client.close()


def make_groups(turn: int) -> list[RolloutGroup]:
    """Make the groups of one step. Their queries occur in no other turn."""
    generator = random.Random(turn)
    text = lambda words: " ".join(generator.choices(WORDS, k=words))  # noqa: E731
    rubrics = tuple(Rubric(text(20), weight) for weight in (5, 4, 3))
    groups = []
    for i in range(QUERIES):
        anchors = tuple(text(ANCHOR_WORDS) for _ in range(K))
        query = Query(f"{turn}-{i}", [{"role": "user", "content": text(30)}], rubrics, anchors)
        rollouts = tuple(Rollout(n, text(CANDIDATE_WORDS)) for n in range(G))
        groups.append(RolloutGroup(query, rollouts, step=turn, epoch=0))
    return groups


def serve(latency: float, port: multiprocessing.Queue) -> None:
    """Serve answers that depend only on the end of the prompt, `latency` seconds after each request."""

    async def chat(request: web.Request) -> web.Response:
        arrived = asyncio.get_running_loop().time()
        tail = (await request.read())[-4000:]
        if found := re.search(rb"from 0 through (\d+)>", tail):
            number = int.from_bytes(hashlib.sha256(tail).digest()[:4], "big") % (int(found.group(1)) + 1)
            content = f'{{"position": {number}}}'
        else:
            content = f'{{"order": {re.search(rb"permutation of.n(.*?), from worst", tail).group(1).decode()}}}'
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": content}}
        usage = {"prompt_tokens": 2000, "completion_tokens": 8, "total_tokens": 2008}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
        await asyncio.sleep(arrived + latency - asyncio.get_running_loop().time())
        return web.json_response(body | {"usage": usage})

    loopback.serve([web.post("/v1/chat/completions", chat)], port)


class Contest:
    """The two contenders at one server. They take turns."""

    def __init__(self, url: str, model: str, decoding: str, concurrency: int, folder: Path, salted: bool):
        self.url, self.concurrency, self.salted = url, concurrency, salted
        self.client = OpenAIClient(url, model, decoding=decoding, concurrency=concurrency)
        self.scorer = GroupScorer(
            RankBuffer(k0=K), Judge(self.client, guard=False), BufferStore(folder / f"{model}.sqlite")
        )
        self.loop = asyncio.new_event_loop()
        self.session = self.loop.run_until_complete(self.open_session())

    async def open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def turn(self, number: int) -> tuple[Turn, Turn]:
        """Judge one step with RankBuffer, then send the same requests with the floor."""
        recorder = self.scorer.judge.client = Recorder(self.client)
        salt = {"cache_salt": f"ours-{number}"} if self.salted else {}
        self.client.endpoint = replace(self.client.endpoint, request=salt)
        groups = make_groups(number)
        before, cpu, started = self.counters(), time.process_time(), time.perf_counter()
        outcome = self.scorer.score(groups, step=number)
        ours = Turn(time.perf_counter() - started, time.process_time() - cpu, len(outcome.calls))
        ours.prompt, ours.cached = (now - then for now, then in zip(self.counters(), before, strict=True))

        salt = {"cache_salt": f"floor-{number}"} if self.salted else {}
        chains = [
            [[json.dumps(request | salt).encode() for request in kinds[kind]] for kind in ("insert", "fine")]
            for kinds in recorder.requests.values()
        ]
        before, cpu, started = self.counters(), time.process_time(), time.perf_counter()
        self.loop.run_until_complete(self.send_all(chains))
        calls = sum(len(requests) for chain in chains for requests in chain)
        floor = Turn(time.perf_counter() - started, time.process_time() - cpu, calls)
        floor.prompt, floor.cached = (now - then for now, then in zip(self.counters(), before, strict=True))
        return ours, floor

    async def send_all(self, chains: list[list[list[bytes]]]) -> None:
        """Send all chains at once. A chain sends its second requests when all its first ones are answered."""
        slots = asyncio.Semaphore(self.concurrency)
        headers = {"Content-Type": "application/json"}

        async def send(body: bytes) -> None:
            async with slots, self.session.post(f"{self.url}/chat/completions", data=body, headers=headers) as answer:
                await answer.read()
                answer.raise_for_status()

        async def follow(chain: list[list[bytes]]) -> None:
            for requests in chain:
                await asyncio.gather(*map(send, requests))

        await asyncio.gather(*map(follow, chains))

    def counters(self) -> tuple[float, ...]:
        """Return the prompt tokens and the cached prompt tokens that the server has counted so far."""
        if not self.salted:
            return (0, 0)
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics") as page:
            text = page.read().decode()
        return tuple(
            sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE))) for name in COUNTERS.values()
        )

    def close(self) -> None:
        self.scorer.judge.client = self.client
        self.scorer.close()
        self.loop.run_until_complete(self.session.close())


def contend(title: str, contest: Contest, turns: int) -> tuple[list[Turn], list[Turn]]:
    """Take turns, print a table and return the turns of both contenders. The first turn is not counted."""
    contest.turn(0)
    pairs = [contest.turn(number) for number in range(1, turns + 1)]
    contest.close()
    table = Table("turn", "floor, s", "RankBuffer, s", "ratio", "CPU, ms/call", "judgments", "computed", title=title)
    for number, (ours, floor) in enumerate(pairs, start=1):
        table.add_row(
            str(number),
            f"{floor.wall:.3f}",
            f"{ours.wall:.3f}",
            f"{ours.wall / floor.wall:.3f}",
            f"{1000 * ours.cpu / ours.calls:.2f}",
            str(ours.calls),
            f"{computed([ours]):.0%}" if ours.prompt else "",
        )
    Console().print(table)
    return [ours for ours, _ in pairs], [floor for _, floor in pairs]


def computed(turns: list[Turn]) -> float:
    """Return the share of the prompt tokens that the server computed."""
    return 1 - sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)


def ratio(ours: list[Turn], floor: list[Turn]) -> float:
    """Return the ratio of the median wall times."""
    return statistics.median(turn.wall for turn in ours) / statistics.median(turn.wall for turn in floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.5, help="latency of the server of (a) in seconds")
    parser.add_argument("--concurrency", type=int, default=64, help="number of requests in flight")
    parser.add_argument("--turns", type=int, default=7, help="turns per contender, after one that is not counted")
    parser.add_argument("--vllm_url", help="address of a vLLM server for (b)")
    parser.add_argument("--vllm_model", default="judge", help="name of the model that this server serves")
    arguments = parser.parse_args()

    port: multiprocessing.Queue = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(arguments.latency, port), daemon=True)
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        shape = (arguments.concurrency, Path(folder))
        url = f"http://127.0.0.1:{port.get()}/v1"
        title = f"(a) every answer after {arguments.latency:g} s, {arguments.concurrency} in flight"
        ours, floor = contend(title, Contest(url, "fixed", "none", *shape, salted=False), arguments.turns)
        server.terminate()
        result = {
            "benchmark": "judge_throughput",
            "ratio": round(ratio(ours, floor), 4),
            "cpu_ms_per_call": round(1000 * sum(turn.cpu for turn in ours) / sum(turn.calls for turn in ours), 3),
            "floor_cpu_ms_per_call": round(1000 * sum(t.cpu for t in floor) / sum(t.calls for t in floor), 3),
            "wall_s": round(statistics.median(turn.wall for turn in ours), 3),
            "computed_prompt_share": None,
            "latency_s": arguments.latency,
            "concurrency": arguments.concurrency,
        }
        if arguments.vllm_url:
            contest = Contest(arguments.vllm_url, arguments.vllm_model, "regex", *shape, salted=True)
            ours, floor = contend(f"(b) vLLM at {arguments.vllm_url}", contest, arguments.turns)
            result |= {
                "computed_prompt_share": round(computed(ours), 4),
                "vllm_ratio": round(ratio(ours, floor), 4),
                "vllm_judgments_per_s": round(sum(t.calls for t in ours) / sum(t.wall for t in ours), 1),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
