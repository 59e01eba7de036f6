"""Measure how fast raw rows become a checked training set, and whether rubric generation keeps its endpoint busy.

    python benchmarks/prepare_data.py

(a) 10,000 rows of Nectar's schema, with seven responses of 250 words on average, go through
    `recipes/prepare_nectar.py` and `rankbuffer-data check`. Each command is a process, and its imports count. Measured
    are wall seconds and the largest resident size: once with the estimate of 3 characters per token, once with a
    tokenizer (the quickstart's byte-level BPE).
(b) `recipes/generate_rubrics.py` asks a loopback endpoint in its own process. The endpoint answers every request after
    a fixed latency. The ideal time is one latency per full set of requests in flight. The measured time is that of
    `main`, from reading the queries to writing the finished set. The best turn counts, because other work on the
    machine can only add time.

The script prints tables, and then one JSON line. `saturation` is ideal / measured of (b). `seconds` is the sum and
`memory_mb` the maximum of (a) without a tokenizer.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import loopback
from aiohttp import web
from datasets import disable_progress_bars
from rich.console import Console
from rich.table import Table
from simulated_judge import WORDS

from rankbuffer_trl.data import nectar
from rankbuffer_trl.data.output import write_rows

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "recipes"), str(ROOT / "recipes" / "quickstart")]
import generate_rubrics  # noqa: E402

RUBRICS = json.dumps({"rubrics": [{"text": f"Is good in way {i}.", "weight": i} for i in (5, 3, 1)]})


def raw_rows(n: int, path: Path) -> None:
    """Write rows of Nectar's schema. Every tenth row has tied ranks, so the preparation leaves it out."""
    generator = random.Random(0)
    with path.open("w") as lines:
        for number in range(n):
            text = lambda mean: " ".join(generator.choices(WORDS, k=generator.randint(mean // 5, 2 * mean)))  # noqa: E731
            answers = [{"answer": text(250), "model": f"m{rank}", "rank": float(rank)} for rank in range(1, 8)]
            answers[0]["rank"] = 2.0 if number % 10 == 0 else 1.0
            prompt = f"\n\nHuman: {number}: {text(60)}\n\nAssistant: "
            lines.write(json.dumps({"prompt": prompt, "answers": answers, "turns": 1}) + "\n")


def measured(*command: str, cache: str, expected: int = 0) -> tuple[float, float]:
    """Run a Python command that ends with an expected status. Return its wall seconds and its largest size in MB."""
    environment = os.environ | {"HF_DATASETS_CACHE": cache, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def build_tokenizer(folder: Path) -> str:
    """Save the quickstart's tokenizer to a folder and return the folder."""
    from policy import DATA, build_tokenizer

    rows = map(json.loads, DATA.read_text().splitlines())
    build_tokenizer([text for row in rows for text in row["responses"]]).save_pretrained(folder)
    return str(folder)


def serve(latency: float, port: multiprocessing.Queue) -> None:
    """Serve rubrics, `latency` seconds after each request."""

    async def chat(request: web.Request) -> web.Response:
        arrived = asyncio.get_running_loop().time()
        await request.read()
        await asyncio.sleep(arrived + latency - asyncio.get_running_loop().time())
        usage = {"prompt_tokens": 2500, "completion_tokens": 80}
        return web.json_response({"choices": [{"message": {"content": RUBRICS}}], "usage": usage})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "writer", "object": "model"}]})

    loopback.serve([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)], port)


def generation(source: Path, folder: Path, latency: float, concurrency: int, turns: int) -> list[float]:
    """Generate rubrics several times and return the seconds of each turn."""
    spawn = multiprocessing.get_context("spawn")
    port = spawn.Queue()
    server = spawn.Process(target=serve, args=(latency, port), daemon=True)
    server.start()
    seconds = []
    try:
        url = f"http://127.0.0.1:{port.get(timeout=60)}/v1"
        for turn in range(turns):
            config = generate_rubrics.RubricsConfig(
                dataset_name=str(source),
                output_file=str(folder / f"with_rubrics_{turn}.jsonl"),
                judge_url=url,
                judge_model="writer",
                judge_concurrency=concurrency,
            )
            started = time.perf_counter()
            if generate_rubrics.main(config):
                raise RuntimeError("rubric generation failed")
            seconds.append(time.perf_counter() - started)
        return seconds
    finally:
        server.kill()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000, help="number of raw rows of (a)")
    parser.add_argument("--estimate_only", action="store_true", help="run (a) without a tokenizer only")
    parser.add_argument("--queries", type=int, default=512, help="number of queries of (b)")
    parser.add_argument("--latency", type=float, default=2.0, help="latency of the endpoint of (b) in seconds")
    parser.add_argument("--concurrency", type=int, default=64, help="number of requests in flight in (b)")
    parser.add_argument("--turns", type=int, default=2, help="number of turns of (b)")
    arguments = parser.parse_args()
    console = Console(width=119)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw_rows(arguments.rows, folder / "raw.jsonl")
        size = (folder / "raw.jsonl").stat().st_size / 2**20
        table = Table("tokens", "step", "seconds", "MB", title=f"(a) {arguments.rows:,} rows, {size:,.0f} MB of JSON")
        sums = {}
        ways = {"estimated": []}
        if not arguments.estimate_only:
            ways["counted"] = ["--tokenizer", build_tokenizer(folder / "tokenizer")]
        for tokens, flags in ways.items():
            made = str(folder / f"{tokens}.jsonl")
            words = ["--dataset_name", str(folder / "raw.jsonl"), "--output_file", made, "--queries", "0", *flags]
            cache = str(folder / f"cache-{tokens}")
            steps = {
                "prepare": measured("recipes/prepare_nectar.py", *words, cache=cache),
                # The rows have no rubrics yet, so `check` says that they are not ready.
                "check": measured("-m", "rankbuffer_trl.data.command", "check", made, *flags, cache=cache, expected=1),
            }
            for step, (seconds, memory) in steps.items():
                table.add_row(tokens, step, f"{seconds:.1f}", f"{memory:,.0f}")
            sums[tokens] = (sum(s for s, _ in steps.values()), max(m for _, m in steps.values()))
        console.print(table)

        raw_rows(arguments.queries * 10 // 9 + 2, folder / "few.jsonl")
        few = nectar.sample(map(json.loads, (folder / "few.jsonl").open()), arguments.queries, 42)
        write_rows(folder / "few_made.jsonl", few.rows)
        ideal = arguments.latency * math.ceil(arguments.queries / arguments.concurrency)
        load = (arguments.latency, arguments.concurrency, arguments.turns)
        turns = generation(folder / "few_made.jsonl", folder, *load)
        title = (
            f"(b) {arguments.queries:,} queries, {arguments.concurrency} in flight, latency {arguments.latency:g} s"
        )
        table = Table("turn", "ideal, s", "measured, s", "ideal / measured", title=title)
        for turn, seconds in enumerate(turns, start=1):
            table.add_row(str(turn), f"{ideal:.1f}", f"{seconds:.1f}", f"{ideal / seconds:.2f}")
        console.print(table)
    summary = {
        "rows": arguments.rows,
        "seconds": round(sums["estimated"][0], 1),
        "seconds_with_tokenizer": round(sums["counted"][0], 1) if "counted" in sums else None,
        "memory_mb": round(max(memory for _, memory in sums.values())),
        "saturation": round(ideal / min(turns), 3),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
