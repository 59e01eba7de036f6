"""The embedded rubric judge as an OpenAI-compatible server, to try the HTTP path without a language model.

    python -m rankbuffer_tools.rubric_server --port 8001

The server answers `POST /v1/chat/completions`, `GET /v1/models` and `GET /health`. It listens on loopback unless
`--host` says otherwise. It has no streaming, no keys, and no parameter that changes an answer.
"""

import argparse
import sys
import time

from aiohttp import web

from rankbuffer_trl.judge import RubricJudge, TransportError, Usage, without_doubt
from rankbuffer_trl.judge.config import PING

from .batch.recipes import KeyParser


def make_app(judge: RubricJudge | None = None) -> web.Application:
    """Make the server as an aiohttp application."""
    judge = judge or RubricJudge()

    async def chat(request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError as error:
            return _error(400, f"the body is not JSON: {error}")
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return _error(400, "the body has no list of messages")
        if body.get("model") != judge.model:
            return _error(404, f"the model {body.get('model')!r} does not exist; this server serves {judge.model!r}")
        try:
            text, usage = ("pong", Usage(1, 0, 1)) if body["messages"] == PING else judge.answer(body["messages"])
        except (KeyError, StopIteration, TypeError, TransportError) as error:
            return _error(400, f"not a question for this judge: {error}")
        message = {"role": "assistant", "content": text}
        # A rule has no doubt: the word has all the probability.
        logprobs = without_doubt(text) if body.get("logprobs") else None
        return web.json_response(
            {
                "id": "chatcmpl-rubric-judge",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": judge.model,
                "choices": [{"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}],
                "usage": {
                    "prompt_tokens": usage.prompt,
                    "completion_tokens": usage.completion,
                    "total_tokens": usage.prompt + usage.completion,
                    "prompt_tokens_details": {"cached_tokens": usage.cached},
                },
            }
        )

    async def models(request: web.Request) -> web.Response:
        entry = {"id": judge.model, "object": "model", "created": 0, "owned_by": "rankbuffer-trl"}
        return web.json_response({"object": "list", "data": [entry]})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models), web.get("/health", health)])
    return app


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


if __name__ == "__main__":
    parser = KeyParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8001, help="0 takes a free one")
    arguments = parser.parse_args()
    try:
        web.run_app(make_app(), host=arguments.host, port=arguments.port)
    except (OSError, OverflowError) as error:
        sys.exit(
            f"{parser.prog}: cannot listen at {arguments.host}, port {arguments.port} ({error}): name another --port"
        )
