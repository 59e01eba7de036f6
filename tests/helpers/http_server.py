"""A real HTTP server on loopback, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web


@contextmanager
def served(app: web.Application, port: int = 0) -> Iterator[str]:
    """Serve `app` on a loopback port from a new thread and yield the address. Port 0 means any free port."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []
    runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        address.extend(runner.addresses)
        ready.set()

    def serve():
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield f"http://127.0.0.1:{address[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
