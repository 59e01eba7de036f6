"""A server on a free loopback port. A benchmark starts it in its own process and ends it."""

import asyncio
from collections.abc import Iterable
from multiprocessing.queues import Queue

from aiohttp import web


def serve(routes: Iterable[web.RouteDef], port: Queue) -> None:
    """Serve `routes` until the process is ended, and put the chosen port into `port`."""

    async def run() -> None:
        app = web.Application(client_max_size=2**24)
        app.add_routes(routes)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())
