"""Real HTTP servers on loopback, in a thread of the test's process: any application, and a judge that misbehaves."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from aiohttp import web

from rankbuffer_trl.judge import Judge, TransportError
from rankbuffer_trl.judge._openai_client import OpenAIClient

CHAT = "/v1/chat/completions"
KEY = "sk-a-key-that-nobody-may-see"
CANDIDATE = "a candidate that nobody else may see"
GOOD = '{"position": 1}'
SURROGATE = "I would say \ud83d"  # what is left of an emoji that was cut in two
PATIENT = 20.0  # seconds; a slow machine needs less
EVENT_LIMIT = 30.0  # seconds for what should happen at once


@contextmanager
def served(app: web.Application | dict[str, Callable], port: int = 0) -> Iterator[str]:
    """Serve an application, or handlers by their paths, on a loopback port from a new thread and yield the address.

    Port 0 means any free port.
    """
    if isinstance(app, dict):
        handlers, app = app, web.Application(client_max_size=2**28)
        app.add_routes([web.route("*", path, handler) for path, handler in handlers.items()])
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


# What a server can do wrong. A handler gets the request and its number, from 1.


def completion(content: object, usage: object = "default") -> web.Response:
    if usage == "default":
        usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return web.json_response(body)


def saying(content: object, usage: object = "default") -> Callable:
    return lambda request, n: completion(content, usage)


SOON = {"Retry-After-Ms": "1"}  # a backoff of half a second per row would be long


def status(code: int, text: str = "", headers: dict[str, str] = SOON) -> Callable:
    return lambda request, n: web.Response(status=code, text=text, headers=headers)


def refusing(code: int, message: str) -> Callable:
    """An error in the form of OpenAI and vLLM."""
    error = {"error": {"message": message, "code": code}}
    return lambda request, n: web.json_response(error, status=code, headers=SOON)


def body(content: bytes, kind: str = "application/json", headers: dict | None = None, code: int = 200) -> Callable:
    return lambda request, n: web.Response(body=content, content_type=kind, headers=headers, status=code)


def in_turn(*handlers: Callable) -> Callable:
    """One handler after the other; the last one stays."""
    return lambda request, n: handlers[min(n, len(handlers)) - 1](request, n)


def once(fault: Callable) -> Callable:
    return in_turn(fault, saying(GOOD))


def close(request: web.Request, n: int) -> web.Response:
    request.transport.close()
    return web.Response()


def reset(request: web.Request, n: int) -> web.Response:
    """A TCP reset, as from a process that was killed."""
    linger = struct.pack("ii", 1, 0)
    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.transport.abort()
    return web.Response()


async def cut_off(request: web.Request, n: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    request.transport.close()
    return response


async def slow(request: web.Request, n: int) -> web.StreamResponse:
    """Headers at once, then the body in pieces."""
    answer = completion(GOOD).body
    response = web.StreamResponse(headers={"Content-Length": str(len(answer)), "Content-Type": "application/json"})
    await response.prepare(request)
    for start in range(0, len(answer), 100):
        await asyncio.sleep(0.05)
        await response.write(answer[start : start + 100])
    return response


async def hang(request: web.Request, n: int) -> web.Response:
    await asyncio.sleep(EVENT_LIMIT)
    return completion(GOOD)  # so that a client without a timeout would fail its test


async def hang_in_the_body(request: web.Request, n: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b" ")
    await asyncio.sleep(EVENT_LIMIT)
    await response.write(completion(GOOD).body)
    return response


async def drip(request: web.Request, n: int) -> web.StreamResponse:
    """A blank now and then, for ever: no read takes long."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


def counting(context: int | None, answer: str = "7", tokenizes: bool = True) -> Callable:
    """A server of model `m` with a context, which counts a token per word."""

    async def handle(request: web.Request, n: int) -> web.Response:
        if request.path == "/v1/models":
            row = {"id": "m", "object": "model", "created": 0, "owned_by": "t", "max_model_len": context}
            return web.json_response({"object": "list", "data": [row]})
        if request.path == "/tokenize":
            (message,) = (await request.json())["messages"]
            return web.json_response({"count": len(message["content"].split())} if tokenizes else {})
        return completion(answer)

    return handle


@contextmanager
def judged_by(handler: Callable) -> Iterator[str]:
    """Serve a judge that gives `handler(prompt)`, which may be a coroutine, and yield the address for a client."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = handler((await request.json())["messages"][0]["content"])
        return await response if asyncio.iscoroutine(response) else response

    with served({CHAT: chat}) as address:
        yield address + "/v1"


class Fault:
    """Plays one handler and remembers the requests."""

    def __init__(self):
        self.handler: Callable = saying(GOOD)
        self.seen: list[dict] = []
        self.asked = 0  # requests for a completion
        self.url = ""

    @property
    def netloc(self) -> str:
        return urlsplit(self.url).netloc

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(await request.json() if request.can_read_body else {})
        self.asked += request.path == CHAT
        response = self.handler(request, len(self.seen))
        return await response if asyncio.iscoroutine(response) else response

    def play(self, handler: Callable) -> "Fault":
        self.handler, self.seen, self.asked = handler, [], 0
        return self

    def client(self, handler: Callable, retries: int, timeout: float = PATIENT, **kwargs) -> "Noting":
        url = self.play(handler).url
        return Noting(url, "m", api_key_env="FAULT_KEY", timeout=timeout, max_retries=retries, **kwargs)

    def judge(self, *args, **kwargs) -> Judge:
        return Judge(self.client(*args, **kwargs), max_attempts=2, guard=False)


class Noting(OpenAIClient):
    """Keeps the last fault, of which a judge tells the text alone."""

    fault: TransportError | None = None

    async def complete(self, messages, **kwargs):
        try:
            return await super().complete(messages, **kwargs)
        except TransportError as fault:
            self.fault = fault
            raise


@contextmanager
def serving(fault: Fault | None = None, port: int = 0) -> Iterator[Fault]:
    """Serve a fault on a port; 0 means any free one."""
    fault = fault or Fault()
    with served(dict.fromkeys((CHAT, "/v1/models", "/tokenize"), fault), port) as address:
        fault.url = address + "/v1"
        yield fault


def within(seconds: float, client: OpenAIClient, what: Callable) -> object:
    """What `what` gives, if it needs no longer; the client is closed then."""

    async def run():
        try:
            async with asyncio.timeout(seconds):
                return await what()
        finally:
            await client.close()

    return asyncio.run(run())


def ask_first(judge: Judge, question) -> None:
    async def run():
        try:
            await judge.first_question(question)
        finally:
            await judge.client.close()

    asyncio.run(run())
