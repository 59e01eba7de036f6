"""The HTTP interface of `rankbuffer-serve`: groups come in as JSON, rewards go out. `docs/other_trainers.md` has it.

A request is admitted before its body is read: by its token or, without one, by an address of this machine. So a page
in a browser cannot post groups. An error is one line of JSON. A bug is in the server's log alone.
"""

import asyncio
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

from aiohttp import web

from rankbuffer_trl.data.queries import DataError, QueryTable, generic_row, normal_row, row_faults
from rankbuffer_trl.decoding import decode, parse_json
from rankbuffer_trl.errors import RankBufferError
from rankbuffer_trl.groups import Query
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.rewards.format import AnswerReader
from rankbuffer_trl.training.step import RESUME

from ..train.metrics import EXPOSITION
from .groups import ConflictError, SingleGroups

logger = logging.getLogger(__name__)

MOST_BYTES = 16 * 2**20
"""Bytes of a body."""
MOST_TEXTS = 256
"""Texts of a group."""
MOST_CHARACTERS = 200_000
"""Characters of a text."""
LAST_STEP = 10**18
"""The first number that is no step."""
LONGEST_READ = 30.0
"""Seconds for the head of a request, and for its body. A connection may be idle as long."""
DRAIN = 5.0
"""Seconds that open groups have at the end. `docker stop` kills after 10."""
ENDS = "the server is about to end: post the group to the next one"
LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?")
"""The header `Host` of a request to this machine. A page that rebinds a name of its own to it sends that name."""
STATUS = {ConflictError: 409, JudgeError: 502, RankBufferError: 503}
"""The status of an error, by the first class that fits."""

T = TypeVar("T")


@dataclass(frozen=True)
class GroupRequest:
    """The body of `POST /v1/groups`. A server with a data set looks the query up by `query_id` or `prompt`."""

    texts: list[str]
    query_id: str | None = None
    prompt: Any = None
    rubrics: Any = None
    responses: Any = None
    step: int | None = None
    train: bool = True
    run: str | None = None

    def __post_init__(self):
        if not 1 <= len(self.texts) <= MOST_TEXTS or max(map(len, self.texts)) > MOST_CHARACTERS:
            raise ValueError(f"texts must be 1 to {MOST_TEXTS} texts of at most {MOST_CHARACTERS:,} characters")
        if self.step is not None:
            RewindRequest(self.step)


@dataclass(frozen=True)
class RewindRequest:
    """The body of `POST /v1/rewind`."""

    step: int

    def __post_init__(self):
        if not 0 <= self.step < LAST_STEP:
            raise ValueError(f"step must be from 0 to {LAST_STEP - 1}, got {self.step}")


def is_loopback(host: str) -> bool:
    """Return whether an address or a name is that of this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class GroupServer:
    """The requests of `rankbuffer-serve`.

    Args:
        groups (`SingleGroups`):
            Judge and store.
        answers (`AnswerReader`):
            Reads the answers out of the texts.
        queries (`QueryTable`, *optional*):
            The queries. Without them, each request brings its own prompt and rubrics.
        token (`str`, *optional*):
            What a request must have as its bearer token. Without it, only requests to this machine itself are served.
    """

    def __init__(
        self, groups: SingleGroups, answers: AnswerReader, queries: QueryTable | None = None, token: str = ""
    ):
        self.groups = groups
        self.answers = answers
        self.queries = queries
        self.token = token
        self.draining = False
        self._limits: set[asyncio.Timeout] = set()  # of the open groups, without an end until the server drains
        self._closed = asyncio.Condition()  # notified when a group is
        self._answers: Counter[int] = Counter()  # to posted groups, by status
        self._seconds = 0.0  # that they took

    @property
    def open(self) -> int:
        """The number of open groups."""
        return len(self._limits)

    def runner(self) -> web.AppRunner:
        """Make the runner, which closes connections that say nothing. Its end does not wait for half requests."""
        return web.AppRunner(self.app(), access_log=None, keepalive_timeout=LONGEST_READ, shutdown_timeout=1.0)

    def app(self) -> web.Application:
        """Make the aiohttp application."""
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._answer])
        app.add_routes([web.get("/health", self._health), web.post("/v1/groups", self._score)])
        app.add_routes([web.post("/v1/rewind", self._rewind), web.get("/metrics", self._metrics)])
        return app

    async def drain(self) -> None:
        """Take no new group, and give those that are open [`DRAIN`] seconds. The others are not recorded."""
        self.draining = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time() + DRAIN)
        async with self._closed:
            await self._closed.wait_for(lambda: not self.open)

    async def until(self, holds: Callable[[], T]) -> T:
        """Wait until this holds when a group closes, and return its value."""
        async with self._closed:
            return await self._closed.wait_for(holds)

    @web.middleware
    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        started, answer = time.perf_counter(), await self._answered(request, handler)
        if request.path == "/v1/groups":
            self._answers[answer.status] += 1
            self._seconds += time.perf_counter() - started
        return answer

    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self._admit(request)
            return await handler(request)
        except web.HTTPException as refusal:
            status, line = refusal.status, refusal.text or refusal.reason
        except RankBufferError as error:
            status = next(code for kind, code in STATUS.items() if isinstance(error, kind))
            line = str(error).replace(RESUME, "Nothing of this group was recorded: post it again.")
            logger.warning(line)
        except Exception:
            logger.exception("a bug in rankbuffer-serve, at %s", request.path)
            status, line = 500, "an error inside rankbuffer-serve; its log has the traceback"
        return web.json_response({"error": line}, status=status)

    def _admit(self, request: web.Request) -> None:
        if self.token:
            sent = request.headers.get("Authorization", "").encode(errors="replace")
            if not hmac.compare_digest(sent, f"Bearer {self.token}".encode()):
                raise web.HTTPUnauthorized(text="the header Authorization: Bearer has no token, or another one")
        elif not LOCAL.fullmatch(request.host):
            raise web.HTTPForbidden(text="this server has no token, so it serves 127.0.0.1 and localhost alone")

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="the header Content-Type must be application/json")
        try:
            async with asyncio.timeout(LONGEST_READ):
                content = await request.read()
            body = decode(parse_json(content, at="the body"), dict[str, Any], "the body")
            if unknown := sorted(body.keys() - kind.__annotations__):
                raise ValueError(f"there is no field {unknown[0]!r}; the fields are {', '.join(kind.__annotations__)}")
            return decode(body, kind)
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"the body was not there within {LONGEST_READ:g} s") from None
        except (ConnectionError, web.RequestPayloadError):  # the client is gone, or says a wrong encoding
            raise web.HTTPBadRequest(text="the body was cut off, or cannot be decoded") from None
        except ValueError as error:
            raise web.HTTPBadRequest(text=str(error)) from None

    async def _health(self, request: web.Request) -> web.Response:
        state = "draining" if self.draining else "ok"
        return web.json_response({"status": state, "run": self.groups.run, "open": self.open})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Answer in the text format of Prometheus. Groups are those of this process, tokens all of the folder."""
        spent = self.groups.store.spent
        kinds = {"prompt": spent.spent_prompt_tokens, "cached": spent.spent_cached_tokens}
        kinds["completion"] = spent.spent_completion_tokens
        lines = [
            "# TYPE rankbuffer_open_groups gauge",
            f"rankbuffer_open_groups {self.open}",
            "# TYPE rankbuffer_groups_total counter",
            *(f'rankbuffer_groups_total{{status="{code}"}} {count}' for code, count in sorted(self._answers.items())),
            "# TYPE rankbuffer_group_seconds summary",
            f"rankbuffer_group_seconds_sum {self._seconds:.3f}",
            f"rankbuffer_group_seconds_count {self._answers.total()}",
            "# HELP rankbuffer_judge_tokens_total of all attempts; cached tokens are among the prompt tokens",
            "# TYPE rankbuffer_judge_tokens_total counter",
            *(f'rankbuffer_judge_tokens_total{{kind="{kind}"}} {count}' for kind, count in kinds.items()),
        ]
        return web.Response(text="\n".join([*lines, ""]), headers={"Content-Type": EXPOSITION})

    async def _score(self, request: web.Request) -> web.Response:
        body = await self._read(request, GroupRequest)
        query = self._query(body)
        texts = [answer.text for answer in self.answers.read([None] * len(body.texts), body.texts, None)]
        if self.draining:
            raise web.HTTPServiceUnavailable(text=ENDS)
        limit = asyncio.timeout(None)
        self._limits.add(limit)  # before it waits for anything, so that no rewind changes the run that it named
        try:
            async with limit:
                run = await self.groups.run_id()
                if body.run not in (None, run):
                    raise ConflictError(f"this server has the run {run}, not {body.run!r}")
                scored = await self.groups.score(query, texts, body.step, body.train)
        except TimeoutError:
            if not limit.expired():
                raise
            raise web.HTTPServiceUnavailable(text=ENDS) from None
        finally:
            self._limits.discard(limit)
            async with self._closed:
                self._closed.notify_all()
        return web.json_response({"run": run, "query_id": query.id, **asdict(scored)})

    def _query(self, body: GroupRequest) -> Query:
        row = normal_row({"query_id": body.query_id, "prompt": body.prompt})
        if self.queries is None:
            row |= {"rubrics": body.rubrics, "responses": body.responses}
            row |= generic_row("a group") if body.rubrics is None else {}
            for fault in row_faults(row, "the group", {}, self.groups.method.responses_needed):
                raise web.HTTPBadRequest(text=fault)
            return Query.from_row(row)
        if (body.rubrics, body.responses) != (None, None):
            raise web.HTTPBadRequest(text="this server has a data set with rubrics and responses: leave them out")
        try:
            return self.queries[row["query_id"]]
        except DataError as error:
            raise web.HTTPNotFound(text=str(error)) from None

    async def _rewind(self, request: web.Request) -> web.Response:
        body = await self._read(request, RewindRequest)
        if self.open:
            raise ConflictError(f"{self.open} groups are being scored: rewind before the trainer goes on")
        await self.groups.rewind(body.step)
        return web.json_response({"run": await self.groups.run_id(), "step": body.step})
