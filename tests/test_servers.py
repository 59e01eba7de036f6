"""Several judge servers: a query stays with its own, moves when that one dies, returns with it, and loses nothing.

A training run whose server is killed is in `test_servers_in_training.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from aiohttp import web
from conftest import order, servers
from helpers.http_server import served
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, Question, RubricJudge, insertion_question
from rankbuffer_trl.judge.openai_client import PING, OpenAIClient
from rankbuffer_trl.judge.serve import make_app
from rankbuffer_trl.judge.servers import HOLDS, Servers
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.scorer import GroupScorer

PATIENCE = 30.0  # seconds for what should happen at once
FOR_EVER = 1e9


# Which server: pure functions of the addresses and the query.

URLS = st.lists(st.integers(1, 999).map("http://judge-{}/v1".format), min_size=1, max_size=6, unique=True)
FOUR = [f"http://127.0.0.1:{port}/v1" for port in (8001, 8002, 8003, 8004)]
IDS = [f"query-{i}" for i in range(1000)]


@given(st.data(), URLS, st.text(max_size=20))
def test_every_query_orders_all_servers_however_they_are_listed(data, urls, query_id):
    preferred = order(servers(*urls), query_id)
    assert sorted(preferred) == sorted(urls)
    assert order(servers(*data.draw(st.permutations(urls))), query_id) == preferred


@given(st.data(), URLS, st.text(max_size=20))
def test_without_a_server_the_others_keep_their_order(data, urls, query_id):
    gone = data.draw(st.sampled_from(urls))
    rest = [url for url in urls if url != gone]
    assert order(servers(*rest), query_id) == [url for url in order(servers(*urls), query_id) if url != gone]


def test_only_a_servers_own_queries_move_when_it_goes_or_comes():
    for gone in FOUR:
        fewer = servers(*(url for url in FOUR if url != gone))
        moved = {id for id in IDS if order(fewer, id)[0] != order(servers(*FOUR), id)[0]}
        assert moved == {id for id in IDS if order(servers(*FOUR), id)[0] == gone}


def test_the_load_is_about_even_and_stays_so_without_one_server():
    first = Counter(order(servers(*FOUR), id)[0] for id in IDS)
    assert set(first) == set(FOUR)
    assert all(150 <= n <= 350 for n in first.values())
    for gone in FOUR:
        heirs = Counter(order(servers(*FOUR), id)[1] for id in IDS if order(servers(*FOUR), id)[0] == gone)
        assert set(heirs) == set(FOUR) - {gone}, "its queries are spread over all the others"
        assert max(heirs.values()) < 0.5 * first[gone]


# Real servers on loopback.

Handler = Callable[[web.Request, int], web.StreamResponse | Coroutine]


class Server:
    """Serves the rubric judge on a port of its own; can be told to misbehave, closed, and opened again."""

    def __init__(self):
        self.port = 0
        self.fault: Handler | None = None  # given the request and its number, from 1; `None` to answer
        self.pong: Callable[[web.Request], Coroutine] | None = None  # how a probe is answered; `None` for well
        self.asked = self.pings = self.in_flight = self.most_in_flight = 0
        self.judge = RubricJudge()
        self._open = ExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def open(self) -> "Server":
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self.port = int(self._open.enter_context(served(app, self.port)).rpartition(":")[2])
        return self

    def close(self) -> None:
        self._open.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] != self.judge.model:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        if body["messages"] == PING:
            self.pings += 1
            return await self.pong(request) if self.pong else self._answer("pong")
        self.asked += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = self.fault(request, self.asked) if self.fault else None
            response = await response if asyncio.iscoroutine(response) else response
            return response or self._answer(self.judge.answer(body["messages"])[0])
        finally:
            self.in_flight -= 1

    def _answer(self, text: str) -> web.Response:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        return web.json_response({"choices": [choice], "usage": usage})


def status(code: int) -> Handler:
    return lambda request, n: web.json_response({"error": {"message": "no"}}, status=code, headers=AT_ONCE)


AT_ONCE = {"Retry-After-Ms": "1"}


def first(times: int, fault: Handler) -> Handler:
    return lambda request, n: fault(request, n) if n <= times else None


async def drip(request: web.Request) -> web.StreamResponse:
    """A blank now and then, for ever: no read takes long."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


async def hang(request: web.Request, n: int) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def two() -> Iterator[tuple[Server, Server]]:
    pair = Server().open(), Server().open()
    yield pair
    for server in pair:
        server.close()


def make(pair: tuple[Server, ...], probe_every: float = 0.0, wait: float = 0.0, **kwargs) -> Judge:
    clients = [OpenAIClient(server.url, "rubric-judge", **({"max_retries": 0} | kwargs)) for server in pair]
    return Judge(Servers(clients, probe_every=probe_every, wait=wait), max_attempts=1)


def at_home(judge: Judge, server: Server, number: int) -> list[Question]:
    """Questions about `number` queries that prefer `server`; the verdict on the i-th is i % 3."""
    ids = (id for id in map("query-{}".format, count()) if judge.client.order(id)[0].url == server.url)
    rubrics = (Rubric("Says: rinse, boil, simmer.", 1),)
    texts = ("Nothing.", "Rinse.", "Rinse, boil.", "Rinse, boil, simmer.")
    queries = [Query(next(ids), [{"role": "user", "content": "Rice?"}], rubrics) for _ in range(number)]
    anchors = (texts[1], texts[2])
    return [insertion_question(query, anchors, texts[(0, 1, 3)[i % 3]]) for i, query in enumerate(queries)]


def run(judge: Judge, test: Coroutine):
    """Run one test on one event loop, as training does, and close the judge."""

    async def run_and_close():
        try:
            async with asyncio.timeout(PATIENCE):
                return await test
        finally:
            await judge.client.close()

    return asyncio.run(run_and_close())


async def calls(judge: Judge, questions: list[Question]) -> list[Call]:
    """Ask all at once; the calls in the order of the questions, each parsed with the right verdict."""
    verdicts = await judge.ask_all(questions)
    made = {call.query_id: call for call in judge.drain()}
    assert verdicts == [i % 3 for i in range(len(questions))]
    return [made[question.query_id] for question in questions]


async def until(judge: Judge, question: Question, server: Server) -> None:
    """Ask a question again and again until `server` answers it."""
    while True:
        await judge.ask(question)
        (call,) = judge.drain()
        assert call.outcome == "parsed"
        if call.server == server.url:
            return


def log(caplog) -> list[str]:
    """What the run was told of its servers."""
    return [record.getMessage() for record in caplog.records if record.name == "rankbuffer_trl.judge.servers"]


def test_a_query_stays_with_its_server(two, caplog):
    judge = make(two)
    homes = [(server, at_home(judge, server, 6)) for server in two]

    async def test():
        for _ in range(3):
            for server, questions in homes:
                assert [(c.server, c.attempts) for c in await calls(judge, questions)] == [(server.url, 1)] * 6

    run(judge, test())
    assert [server.asked for server in two] == [18, 18]
    assert [server.pings for server in two] == [0, 0]
    assert log(caplog) == []


def test_a_dead_servers_queries_move_and_return_with_it_and_no_others(two, caplog):
    lost, other = two
    judge = make(two)
    moving, staying = at_home(judge, lost, 9), at_home(judge, other, 9)

    async def test():
        before = await calls(judge, moving)
        assert {call.server for call in before} == {lost.url}

        await asyncio.to_thread(lost.close)
        gap = await calls(judge, moving)
        assert {call.server for call in gap} == {other.url}
        assert {call.attempts for call in gap} <= {1, 2} and max(call.attempts for call in gap) == 2
        assert [call.usage for call in gap] == [call.usage for call in before]
        assert {(c.server, c.attempts) for c in await calls(judge, staying)} == {(other.url, 1)}
        assert {(c.server, c.attempts) for c in await calls(judge, moving)} == {(other.url, 1)}, "none tries it again"
        (line,) = log(caplog)
        assert f"{lost.url} is down" in line and "Connect" in line

        await asyncio.to_thread(lost.open)
        await until(judge, moving[0], lost)
        assert {(c.server, c.attempts) for c in await calls(judge, moving)} == {(lost.url, 1)}
        assert {(c.server, c.attempts) for c in await calls(judge, staying)} == {(other.url, 1)}

    run(judge, test())
    assert log(caplog)[1:] == [f"the judge server {lost.url} is back"]


def test_questions_in_flight_at_a_server_that_dies_are_answered_by_another(two, caplog):
    lost, other = two
    judge = make(two)
    lost.fault = hang

    async def test():
        asked = asyncio.create_task(calls(judge, at_home(judge, lost, 9)))
        while lost.in_flight < 9:
            await asyncio.sleep(0)
        await asyncio.to_thread(lost.close)
        assert [(call.server, call.attempts) for call in await asked] == [(other.url, 2)] * 9

    run(judge, test())
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("fault", [status(502), status(503), status(504), hang], ids=["502", "503", "504", "hanging"])
def test_a_server_that_gives_no_answer_is_taken_for_down(two, caplog, fault):
    lost, other = two
    judge = make(two, probe_every=FOR_EVER, max_retries=2)
    if fault is hang:
        judge.client.clients[0] = OpenAIClient(lost.url, "rubric-judge", timeout=0.3)
    (question,) = at_home(judge, lost, 1)
    lost.fault = fault

    async def test():
        assert [(c.server, c.attempts) for c in await calls(judge, [question])] == [(other.url, 2)]
        assert [(c.server, c.attempts) for c in await calls(judge, [question])] == [(other.url, 1)]

    run(judge, test())
    assert lost.asked == 1
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("code", [408, 409, 429, 500])
def test_a_busy_server_keeps_its_queries(two, caplog, code):
    busy, other = two
    judge = make(two, max_retries=2)
    (question,) = at_home(judge, busy, 1)
    busy.fault = first(2, status(code))

    async def test():
        assert [(c.server, c.attempts) for c in await calls(judge, [question])] == [(busy.url, 3)]
        busy.fault = status(code)
        assert await judge.ask(question) is None
        (call,) = judge.drain()
        assert (call.server, call.outcome, call.attempts) == (busy.url, "unreachable", 4)
        assert call.error.startswith(f"HTTP {code}")
        busy.fault = None
        assert [(c.server, c.attempts) for c in await calls(judge, [question])] == [(busy.url, 1)]

    run(judge, test())
    assert other.asked == 0
    assert log(caplog) == []


def test_a_busy_server_that_then_dies_loses_its_queries_to_another(two, caplog):
    lost, other = two
    judge = make(two)
    lost.fault = lambda request, n: status(429 if n == 1 else 503)(request, n)

    async def test():
        assert [(c.server, c.attempts) for c in await calls(judge, at_home(judge, lost, 1))] == [(other.url, 3)]

    run(judge, test())
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_a_refused_question_is_asked_of_nobody_else(two, caplog, code):
    home, other = two
    judge = make(two, max_retries=2)
    (question,) = at_home(judge, home, 1)
    home.fault = first(1, status(code))

    async def test():
        assert await judge.ask(question) is None
        (call,) = judge.drain()
        assert (call.server, call.outcome, call.attempts) == (home.url, "unreachable", 1)
        assert call.error.startswith(f"HTTP {code}")
        assert [call.server for call in await calls(judge, [question])] == [home.url], "it is not taken for down"

    run(judge, test())
    assert (home.asked, other.asked) == (2, 0)
    assert log(caplog) == []


def test_with_all_servers_down_a_question_is_unreachable_after_the_retries_at_its_own(two, caplog):
    judge = make(two, probe_every=FOR_EVER, max_retries=2)
    home, other = two
    (question,) = at_home(judge, home, 1)
    home.fault = other.fault = status(503)

    async def test():
        for attempts in (2 + 3, 3):  # at first each server is tried once
            assert await judge.ask(question) is None
            (call,) = judge.drain()
            assert (call.server, call.outcome, call.attempts) == (home.url, "unreachable", attempts)
            assert "HTTP 503" in call.error

    run(judge, test())
    assert (home.asked, other.asked) == (1 + 3 + 3, 1)
    assert len(log(caplog)) == 2


def test_with_nothing_listening_anywhere_a_question_is_unreachable(two):
    judge = make(two)
    for server in two:
        server.close()

    async def test():
        assert await judge.ask(at_home(judge, two[0], 1)[0]) is None
        (call,) = judge.drain()
        assert (call.server, call.outcome, call.attempts) == (two[0].url, "unreachable", 3)
        assert "Connect" in call.error

    run(judge, test())


def test_a_server_that_returns_while_a_question_is_retried_answers_it(two, caplog):
    home, other = two
    judge = make(two, probe_every=FOR_EVER, max_retries=3)
    (question,) = at_home(judge, home, 1)
    home.fault, other.fault = first(3, status(503)), status(503)

    async def test():
        (call,) = await calls(judge, [question])
        assert (call.server, call.attempts) == (home.url, 2 + 3)
        assert [(c.server, c.attempts) for c in await calls(judge, [question])] == [(home.url, 1)]

    run(judge, test())
    assert [line.startswith(f"the judge server {home.url} is back") for line in log(caplog)] == [False, False, True]


def test_a_server_that_now_serves_another_model_stays_down(two, caplog):
    lost, other = two
    judge = make(two)
    (question,) = at_home(judge, lost, 1)

    async def test():
        await asyncio.to_thread(lost.close)
        await calls(judge, [question])
        await asyncio.to_thread(lost.open)
        lost.judge.model = "another-model"
        await stays_away(judge, question, lost, other)
        lost.judge.model = "rubric-judge"
        await until(judge, question, lost)

    run(judge, test())
    assert len(log(caplog)) == 2


async def stays_away(judge: Judge, question: Question, lost: Server, other: Server) -> None:
    """Several looks at `lost` leave its question with `other`."""
    client = next(client for client in judge.client.clients if client.url == lost.url)
    looks, look = [], client.alive

    async def counted() -> bool:
        looks.append(await look())
        return looks[-1]

    client.alive = counted
    while len(looks) < 3:
        assert [call.server for call in await calls(judge, [question])] == [other.url]
    client.alive = look
    assert not any(looks)


@pytest.mark.parametrize(
    "response",
    [
        lambda: web.Response(text="<html>back soon</html>", content_type="text/html"),
        lambda: web.json_response({}),
        lambda: web.json_response({"error": {"message": "starting"}}),
        lambda: web.Response(status=503),
    ],
    ids=["HTML page", "empty object", "error with status 200", "503"],
)
def test_a_server_that_answers_but_does_not_generate_stays_down(two, response, monkeypatch):
    lost, other = two
    judge = make(two)
    (question,) = at_home(judge, lost, 1)
    lost.fault = first(1, status(503))
    monkeypatch.setattr(lost, "_answer", lambda text: response())

    async def test():
        await calls(judge, [question])
        await stays_away(judge, question, lost, other)
        monkeypatch.undo()
        await until(judge, question, lost)

    run(judge, test())


def test_a_server_that_dripped_when_it_was_looked_at_is_taken_back(two):
    lost, _ = two
    judge = make(two, timeout=0.3)
    (question,) = at_home(judge, lost, 1)
    lost.fault, lost.pong = first(1, status(503)), drip

    async def test():
        await calls(judge, [question])
        while not lost.pings:
            await calls(judge, [question])
        lost.pong = None
        await until(judge, question, lost)

    run(judge, test())


# No server is left


@pytest.mark.parametrize("number", [1, 2])
def test_questions_wait_for_a_server_when_all_are_down(two, caplog, number):
    servers = two[:number]
    judge = make(servers, wait=FOR_EVER)
    lost = servers[0]
    questions = at_home(judge, lost, 9)

    async def test():
        before = await calls(judge, questions)
        for server in servers:
            await asyncio.to_thread(server.close)
        asked = asyncio.create_task(calls(judge, questions))
        while not any("questions wait" in line for line in log(caplog)):
            await asyncio.sleep(0)
        later = asyncio.create_task(calls(asker := judge.asker(), questions))
        await asyncio.sleep(0)
        assert not asked.done()
        await asyncio.to_thread(lost.open)
        after = await asked
        assert {call.server for call in after + await later} == {lost.url}
        assert [call.usage for call in after] == [call.usage for call in before]
        assert all(call.attempts > 1 for call in after)
        assert asker.calls == judge.calls == []

    run(judge, test())
    *down, last, back = log(caplog)
    assert len(down) == number - 1
    assert "is down, questions wait up to 1e+09 s for one that answers: Connect" in last
    assert back == f"the judge server {lost.url} is back"


def test_a_question_that_comes_during_an_outage_is_not_sent_into_it(two, caplog):
    (lost,) = servers = two[:1]
    judge = make(servers, wait=FOR_EVER)
    first_one, second = at_home(judge, lost, 2)

    async def test():
        await judge.ask(first_one)
        await asyncio.to_thread(lost.close)
        held = asyncio.create_task(judge.ask(first_one))
        while not log(caplog):
            await asyncio.sleep(0)
        asker = judge.asker()
        late = asyncio.create_task(asker.ask(second))
        await asyncio.sleep(0)
        await asyncio.to_thread(lost.open)
        assert (await held, await late) == (0, 1)
        assert [call.attempts for call in asker.drain()] == [1]

    run(judge, test())


def test_the_wait_for_a_server_has_an_end(two, caplog):
    (lost,) = servers = two[:1]
    judge = make(servers, wait=0.3, max_retries=1)
    questions = at_home(judge, lost, 3)

    async def test():
        await calls(judge, questions)
        await asyncio.to_thread(lost.close)
        for attempts in (2 + 1, 2):  # with retries, and once more after the wait; then at once
            assert await judge.ask_all(questions) == [None] * 3
            made = judge.drain()
            assert {(call.outcome, call.attempts) for call in made} == {("unreachable", attempts)}
            assert all("Connect" in call.error for call in made)

    run(judge, test())
    assert len(log(caplog)) == 2
    assert log(caplog)[1] == "no judge server was back within 0.3 s, so questions fail now"


def test_a_server_that_was_never_there_is_not_waited_for(two):
    servers = two[:1]
    judge = make(servers, wait=FOR_EVER)
    (question,) = at_home(judge, servers[0], 1)
    servers[0].close()

    async def test():
        with pytest.raises(JudgeError, match=r"failed its first question, so nothing was started.*Connect"):
            await judge.first_question(question)

    run(judge, test())


@pytest.mark.parametrize("number", [1, 2])
def test_a_question_that_kills_its_server_again_and_again_is_given_up(two, number):
    servers = two[:number]
    judge = make(servers, wait=FOR_EVER)
    good, deadly = at_home(judge, servers[0], 2)

    async def test():
        await judge.ask(good)
        for server in servers:
            server.fault = status(504)
        before = sum(server.asked for server in servers)
        assert await judge.ask(deadly) is None
        asked = sum(server.asked for server in servers) - before
        assert 1 + HOLDS <= asked <= number * (1 + HOLDS) + number - 1
        for server in servers:
            server.fault = None
        assert await judge.ask(good) == 0

    run(judge, test())


def test_a_busy_single_server_is_not_taken_for_down(two, caplog):
    (server,) = servers = two[:1]
    judge = make(servers, wait=FOR_EVER, max_retries=1)
    (question,) = at_home(judge, server, 1)

    async def test():
        await judge.ask(question)
        server.fault = status(429)
        assert await judge.ask(question) is None

    run(judge, test())
    assert log(caplog) == []


def test_a_step_that_waits_for_a_server_ends_with_its_time(two, tmp_path):
    server, _ = two
    clients = [OpenAIClient(server.url, "rubric-judge", max_retries=0)]
    judge = Judge(Servers(clients, wait=FOR_EVER), max_attempts=1)
    scorer = GroupScorer(RankBuffer(), judge, BufferStore(tmp_path / "store.sqlite"), step_timeout=PATIENCE)
    query = Query("rice", [{"role": "user", "content": "Rice?"}], (Rubric("Says: rinse, boil.", 1),), tuple("abcd"))
    group = RolloutGroup(query, (Rollout(0, "Rinse."), Rollout(1, "Rinse, boil.")), 0, 0)
    try:
        scorer.first_question(query)
        server.close()
        scorer.step_timeout = 0.5
        with pytest.raises(JudgeError, match=r"did not finish a step within judge_step_timeout=0\.5 s"):
            scorer.score([group], 0)
        assert list(scorer.store.rows("SELECT DISTINCT outcome FROM calls")) == [("cancelled",)]
    finally:
        scorer.close()


def test_the_look_at_a_server_makes_the_requests_that_it_takes(two):
    """Servers exist that refuse `max_tokens`; what `judge_request` says of it holds for the look, too."""
    lost, other = two
    judge = make(two, request={"max_tokens": None, "max_completion_tokens": 50})
    (question,) = at_home(judge, lost, 1)
    seen = []

    async def refuse_max_tokens(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append(body)
        if "max_tokens" in body:
            return web.json_response({"error": {"message": "use max_completion_tokens"}}, status=400)
        return other._answer("pong" if body["messages"] == PING else other.judge.answer(body["messages"])[0])

    async def test():
        await asyncio.to_thread(lost.close)
        await calls(judge, [question])
        app = web.Application()
        app.router.add_post("/v1/chat/completions", refuse_max_tokens)
        with served(app, lost.port):
            await until(judge, question, lost)
        assert {body["max_completion_tokens"] for body in seen} == {50}

    run(judge, test())


def test_the_served_rubric_judge_is_seen_to_be_back(two):
    lost = two[0]
    judge = make(two)
    (question,) = at_home(judge, lost, 1)

    async def test():
        await asyncio.to_thread(lost.close)
        await calls(judge, [question])
        with served(make_app(), lost.port):
            await until(judge, question, lost)

    run(judge, test())


def test_a_server_that_is_down_is_looked_at_no_more_often_than_said(two):
    lost, other = two
    judge = make(two, probe_every=FOR_EVER)
    questions = at_home(judge, lost, 9)
    lost.fault = first(1, status(503))

    async def test():
        for _ in range(4):
            await calls(judge, questions[:1])
        assert {call.server for call in await calls(judge, questions)} == {other.url}

    run(judge, test())
    assert (lost.asked, lost.pings) == (1, 0)


def test_one_look_at_a_time_and_none_after_the_end(two):
    lost = two[0]
    judge = make(two)
    questions = at_home(judge, lost, 9)
    lost.fault = first(1, status(503))
    client = next(client for client in judge.client.clients if client.url == lost.url)
    looks, ended = [], []

    async def slow() -> bool:
        looks.append(1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    client.alive = slow

    async def test():
        for _ in range(3):
            await judge.ask_all(questions)
        assert (len(looks), len(ended)) == (1, 0)
        await judge.client.close()
        await asyncio.sleep(0)
        assert (len(looks), len(ended)) == (1, 1)

    run(judge, test())


def test_the_limit_of_what_is_in_flight_holds_for_each_server(two):
    judge = make(two, concurrency=3)
    questions = [question for server in two for question in at_home(judge, server, 12)]
    full = [asyncio.Event(), asyncio.Event()]

    async def test():
        loop = asyncio.get_running_loop()

        def gate(server: Server, event: asyncio.Event) -> Handler:
            opened = asyncio.Event()  # of the server's own loop

            async def wait(request: web.Request, n: int) -> None:
                if n >= 3:
                    loop.call_soon_threadsafe(event.set)
                    opened.set()
                await opened.wait()

            return wait

        for server, event in zip(two, full, strict=True):
            server.fault = gate(server, event)
        await judge.ask_all(questions)

    run(judge, test())
    assert all(event.is_set() for event in full)
    assert [(server.asked, server.most_in_flight) for server in two] == [(12, 3), (12, 3)]
    assert {call.outcome for call in judge.drain()} == {"parsed"}


def test_the_limit_holds_for_the_server_that_takes_over(two):
    lost, other = two
    judge = make(two, concurrency=3)
    lost.close()

    async def test():
        await calls(judge, at_home(judge, lost, 12))

    run(judge, test())
    assert other.asked == 12 and other.most_in_flight <= 3
