"""The numbers of a training in the text format of Prometheus, by a program that runs beside it.

    python -m rankbuffer_tools.train.metrics runs/mine --port 9400

`GET /metrics` answers with the newest whole line of `_rankbuffer/metrics.jsonl`. The training knows nothing of this
program, so nothing here can end it. Before the first line there are no numbers. It listens on loopback unless `--host`
says otherwise.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from aiohttp import web

from rankbuffer_trl.informs.steplog import FILE, step_of

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
TAIL = 2**16  # bytes at the end of the log that are read: more than two lines


def newest(log: Path) -> dict:
    """Return the newest whole line of a run's log; nothing if it has none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    return next((json.loads(line) for line in reversed(lines) if step_of(line) >= 0), {})


def exposition(line: dict) -> str:
    """Return a gauge for each number of a line: `rank/ties` becomes `rankbuffer_rank_ties`."""
    gauges = [
        f"rankbuffer_{re.sub(r'[^a-zA-Z0-9_]', '_', key)} {value}\n"
        for key, value in line.items()
        if type(value) in (int, float)
    ]
    return "".join(f"# TYPE {gauge.split()[0]} gauge\n{gauge}" for gauge in gauges)


def make_app(run: Path) -> web.Application:
    """Make the server as an aiohttp application."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=exposition(newest(run / FILE)), headers={"Content-Type": EXPOSITION})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of the training")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=9400, help="0 takes a free one")
    given = parser.parse_args()
    if not given.run.is_dir():
        sys.exit(f"{parser.prog}: there is no folder {given.run}")
    try:
        web.run_app(make_app(given.run), host=given.host, port=given.port)
    except (OSError, OverflowError) as error:
        sys.exit(f"{parser.prog}: cannot listen at {given.host}, port {given.port} ({error}): name another --port")
