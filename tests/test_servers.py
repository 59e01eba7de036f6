"""Several judge servers: a query stays with its own, moves when that one dies, returns with it, and loses nothing.

A training run whose server is killed is in `test_servers_in_training.py`.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from itertools import count

import pytest
from aiohttp import web
from conftest import order, servers
from helpers.servers import Fault, body, completion, drip, hang, refusing, served, serving, status
from hypothesis import given
from hypothesis import strategies as st

from rankbuffer_tools.service.judge import make_app
from rankbuffer_trl.groups import Query, Rollout, RolloutGroup, Rubric
from rankbuffer_trl.judge import Call, Judge, JudgeError, Question, RubricJudge, insertion_question
from rankbuffer_trl.judge.openai_client import PING, OpenAIClient
from rankbuffer_trl.judge.servers import HOLDS, Servers
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training.scorer import GroupScorer

PATIENCE = 30.0  # seconds for what should happen at once
FOR_EVER = 1e9


# Which server: pure functions of the addresses and the query.

URLS = st.lists(st.integers(1, 999).map("http://judge-{}/v1".format), min_size=1, max_size=6, unique=True)
FOUR = [f"http://127.0.0.1:{port}/v1" for port in (8001, 8002, 8003, 8004)]


@given(st.data(), URLS, st.text(max_size=20))
def test_order_is_the_querys_own_and_without_a_server_that_of_the_others(data, urls, query_id):
    preferred = order(servers(*urls), query_id)
    assert sorted(preferred) == sorted(urls)
    assert order(servers(*data.draw(st.permutations(urls))), query_id) == preferred
    gone = data.draw(st.sampled_from(urls))
    rest = [url for url in urls if url != gone]
    assert order(servers(*rest), query_id) == [url for url in preferred if url != gone]


def test_order_spreads_the_load_and_that_of_a_server_that_goes():
    orders = [order(servers(*FOUR), f"query-{i}") for i in range(1000)]
    first = Counter(each[0] for each in orders)
    assert set(first) == set(FOUR)
    assert all(150 <= n <= 350 for n in first.values())
    for gone in FOUR:
        heirs = Counter(each[1] for each in orders if each[0] == gone)
        assert set(heirs) == set(FOUR) - {gone}, "its queries are spread over all the others"
        assert max(heirs.values()) < 0.5 * first[gone]


# Real servers on loopback.

Handler = Callable[[web.Request, int], web.StreamResponse | Coroutine | None]


class Server(Fault):
    """Serves the rubric judge on a port of its own; can be told to misbehave, closed, and opened again."""

    def __init__(self):
        super().__init__()
        self.fault: Handler | None = None  # for questions, given the request and its number, from 1
        self.pong: Handler | None = None  # for probes; `None` to answer, as `fault`
        self.asked = self.pings = self.in_flight = self.most_in_flight = 0
        self._open = ExitStack()

    @property
    def port(self) -> int:
        return int(self.url.removesuffix("/v1").rpartition(":")[2] or 0)

    def open(self) -> "Server":
        self._open.enter_context(serving(self, self.port))
        return self

    def close(self) -> None:
        self._open.close()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.seen.append(asked)
        probed = asked["messages"] == PING
        self.pings += probed
        self.asked += not probed
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        fault, number = (self.pong, self.pings) if probed else (self.fault, self.asked)
        try:
            response = fault(request, number) if fault else None
            response = await response if asyncio.iscoroutine(response) else response
            return response or completion("pong" if probed else RubricJudge().answer(asked["messages"])[0])
        finally:
            self.in_flight -= 1


def first(times: int, fault: Handler) -> Handler:
    return lambda request, n: fault(request, n) if n <= times else None


class Pair:
    """Two servers, and the judges that a test makes of them."""

    def __init__(self):
        self.lost, self.other = self.both = (Server().open(), Server().open())
        self.judges: list[Judge] = []

    def judge(self, number: int = 2, probe_every: float = 0.0, wait: float = 0.0, **kwargs) -> Judge:
        arguments = {"max_retries": 0} | kwargs
        clients = [OpenAIClient(server.url, RubricJudge.model, **arguments) for server in self.both[:number]]
        self.judges.append(Judge(Servers(clients, probe_every=probe_every, wait=wait), max_attempts=1))
        return self.judges[-1]


@pytest.fixture
def two() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for server in pair.both:
        server.close()


def played(test: Callable[..., Coroutine]) -> Callable:
    """Run a test on one event loop, as training does, and close its judges."""

    @functools.wraps(test)
    def play(two: Pair, **fixtures):
        async def run():
            try:
                async with asyncio.timeout(PATIENCE):
                    await test(two, **fixtures)
            finally:
                for judge in two.judges:
                    await judge.client.close()

        asyncio.run(run())

    return play


def at_home(judge: Judge, server: Server, number: int) -> list[Question]:
    """Questions about `number` queries that prefer `server`; the verdict on the i-th is i % 3."""
    ids = (id for id in map("query-{}".format, count()) if judge.client.order(id)[0].url == server.url)
    rubrics = (Rubric("Says: rinse, boil, simmer.", 1),)
    texts = ("Nothing.", "Rinse.", "Rinse, boil.", "Rinse, boil, simmer.")
    queries = [Query(next(ids), [{"role": "user", "content": "Rice?"}], rubrics) for _ in range(number)]
    anchors = (texts[1], texts[2])
    return [insertion_question(query, anchors, texts[(0, 1, 3)[i % 3]]) for i, query in enumerate(queries)]


async def calls(judge: Judge, questions: list[Question]) -> list[Call]:
    """Ask all at once; the calls in the order of the questions, each parsed with the right verdict."""
    verdicts = await judge.ask_all(questions)
    made = {call.query_id: call for call in judge.drain()}
    assert verdicts == [i % 3 for i in range(len(questions))]
    return [made[question.query_id] for question in questions]


async def answered(judge: Judge, *questions: Question) -> set[tuple[str, int]]:
    """Ask all at once; which server answered, after how many attempts."""
    return {(call.server, call.attempts) for call in await calls(judge, list(questions))}


async def failed(judge: Judge, question: Question) -> tuple[str, int, str]:
    """Ask a question that nobody answers; the server, the attempts and the error."""
    assert await judge.ask(question) is None
    (call,) = judge.drain()
    assert call.outcome == "unreachable"
    return call.server, call.attempts, call.error


async def until(judge: Judge, question: Question, server: Server) -> None:
    """Ask a question again and again until `server` answers it."""
    while server.netloc not in {name for name, _ in await answered(judge, question)}:
        pass


def log(caplog) -> list[str]:
    """What the run was told of its servers."""
    return [record.getMessage() for record in caplog.records if record.name == "rankbuffer_trl.judge.servers"]


@played
async def test_servers_keep_a_query_with_its_server(two, caplog):
    judge = two.judge()
    homes = [(server, at_home(judge, server, 6)) for server in two.both]
    for _ in range(3):
        for server, questions in homes:
            assert await answered(judge, *questions) == {(server.netloc, 1)}
    assert [(server.asked, server.pings) for server in two.both] == [(18, 0)] * 2
    assert log(caplog) == []


@played
async def test_servers_move_the_queries_of_a_dead_one_alone_until_it_is_back(two, caplog):
    lost, other, judge = two.lost, two.other, two.judge()
    moving, staying = at_home(judge, lost, 9), at_home(judge, other, 9)
    before = await calls(judge, moving)
    assert {call.server for call in before} == {lost.netloc}

    await asyncio.to_thread(lost.close)
    gap = await calls(judge, moving)
    assert {call.server for call in gap} == {other.netloc}
    assert {call.attempts for call in gap} <= {1, 2} and max(call.attempts for call in gap) == 2
    assert [call.usage for call in gap] == [call.usage for call in before]
    assert await answered(judge, *staying) == await answered(judge, *moving) == {(other.netloc, 1)}, (
        "none tries it again"
    )
    (line,) = log(caplog)
    assert f"{lost.url} is down" in line and "Connect" in line

    await asyncio.to_thread(lost.open)
    await until(judge, moving[0], lost)
    assert await answered(judge, *moving) == {(lost.netloc, 1)}
    assert await answered(judge, *staying) == {(other.netloc, 1)}
    assert log(caplog)[1:] == [f"the judge server {lost.url} is back"]


@played
async def test_servers_answer_what_was_in_flight_at_one_that_dies(two, caplog):
    judge = two.judge()
    two.lost.fault = hang
    asked = asyncio.create_task(answered(judge, *at_home(judge, two.lost, 9)))
    while two.lost.in_flight < 9:
        await asyncio.sleep(0)
    await asyncio.to_thread(two.lost.close)
    assert await asked == {(two.other.netloc, 2)}
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("fault", [status(502), status(503), status(504), hang], ids=["502", "503", "504", "hanging"])
@played
async def test_servers_take_one_that_gives_no_answer_for_down(two, caplog, fault):
    judge = two.judge(probe_every=FOR_EVER, max_retries=2, timeout=1.0 if fault is hang else PATIENCE)
    (question,) = at_home(judge, two.lost, 1)
    two.lost.fault = fault
    assert await answered(judge, question) == {(two.other.netloc, 2)}
    for _ in range(3):
        assert await answered(judge, question) == {(two.other.netloc, 1)}
    assert (two.lost.asked, two.lost.pings) == (1, 0), "it is looked at no more often than said"
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("code", [408, 409, 429, 500])
@played
async def test_servers_leave_a_busy_one_its_queries(two, caplog, code):
    busy, judge = two.lost, two.judge(max_retries=2)
    (question,) = at_home(judge, busy, 1)
    busy.fault = first(2, status(code))
    assert await answered(judge, question) == {(busy.netloc, 3)}
    busy.fault = status(code)
    server, attempts, error = await failed(judge, question)
    assert (server, attempts) == (busy.netloc, 4) and error.startswith(f"HTTP {code}")
    busy.fault = None
    assert await answered(judge, question) == {(busy.netloc, 1)}
    assert two.other.asked == 0
    assert log(caplog) == []


@played
async def test_servers_move_the_queries_of_a_busy_one_that_then_dies(two, caplog):
    judge = two.judge(probe_every=FOR_EVER)
    two.lost.fault = lambda request, n: status(429 if n == 1 else 503)(request, n)
    assert await answered(judge, *at_home(judge, two.lost, 1)) == {(two.other.netloc, 3)}
    assert len(log(caplog)) == 1


@pytest.mark.parametrize("code", [400, 401, 404, 422])
@played
async def test_servers_ask_a_refused_question_of_nobody_else(two, caplog, code):
    home, judge = two.lost, two.judge(max_retries=2)
    (question,) = at_home(judge, home, 1)
    home.fault = first(1, status(code))
    server, attempts, error = await failed(judge, question)
    assert (server, attempts) == (home.netloc, 1) and error.startswith(f"HTTP {code}")
    assert await answered(judge, question) == {(home.netloc, 1)}, "it is not taken for down"
    assert (home.asked, two.other.asked) == (2, 0)
    assert log(caplog) == []


@played
async def test_servers_that_are_all_down_fail_a_question_after_the_retries_at_its_own(two, caplog):
    home, other, judge = two.lost, two.other, two.judge(probe_every=FOR_EVER, max_retries=2)
    (question,) = at_home(judge, home, 1)
    home.fault = other.fault = status(503)
    for attempts in (2 + 3, 3):  # at first each server is tried once
        server, made, error = await failed(judge, question)
        assert (server, made) == (home.netloc, attempts) and "HTTP 503" in error
    assert (home.asked, other.asked) == (1 + 3 + 3, 1)
    assert len(log(caplog)) == 2
    home.fault = first(home.asked + 1, status(503))
    assert await answered(judge, question) == {(home.netloc, 2)}, "it returns while the question is retried"
    assert await answered(judge, question) == {(home.netloc, 1)}
    assert [line.startswith(f"the judge server {home.url} is back") for line in log(caplog)] == [False, False, True]


NOT_UP = {
    "HTML page": body(b"<html>back soon</html>", "text/html"),
    "empty object": body(b"{}"),
    "error with status 200": body(b'{"error": {"message": "starting"}}'),
    "503": status(503),
    "another model": refusing(404, "no such model"),
    "dripping": drip,
}


@pytest.mark.parametrize("case", NOT_UP)
@played
async def test_servers_take_one_back_when_it_generates_and_not_before(two, caplog, case):
    lost, judge = two.lost, two.judge(timeout=0.5 if case == "dripping" else PATIENCE)
    (question,) = at_home(judge, lost, 1)
    lost.fault, lost.pong = first(1, status(503)), NOT_UP[case]
    await calls(judge, [question])
    while lost.pings < 3:
        assert await answered(judge, question) == {(two.other.netloc, 1)}
    lost.pong = None
    await until(judge, question, lost)
    assert len(log(caplog)) == 2


# No server is left


@pytest.mark.parametrize("number", [1, 2])
@played
async def test_servers_that_are_all_down_let_questions_wait(two, caplog, number):
    lost, judge = two.lost, two.judge(number, wait=FOR_EVER)
    questions = at_home(judge, lost, 9)
    before = await calls(judge, questions)
    for server in two.both[:number]:
        await asyncio.to_thread(server.close)
    asked = asyncio.create_task(calls(judge, questions))
    while not any("questions wait" in line for line in log(caplog)):
        await asyncio.sleep(0)
    later = asyncio.create_task(calls(asker := judge.for_method(), questions))
    await asyncio.sleep(0)
    assert not asked.done()
    await asyncio.to_thread(lost.open)
    after = await asked
    assert {call.server for call in after + await later} == {lost.netloc}
    assert [call.usage for call in after] == [call.usage for call in before]
    assert all(call.attempts > 1 for call in after)
    assert asker.calls == judge.calls == []
    *down, last, back = log(caplog)
    assert len(down) == number - 1
    assert "is down, questions wait up to 1e+09 s for one that answers: Connect" in last
    assert back == f"the judge server {lost.url} is back"


@played
async def test_servers_send_no_question_into_an_outage(two, caplog):
    lost, judge = two.lost, two.judge(1, wait=FOR_EVER)
    first_one, second = at_home(judge, lost, 2)
    await judge.ask(first_one)
    await asyncio.to_thread(lost.close)
    held = asyncio.create_task(judge.ask(first_one))
    while not log(caplog):
        await asyncio.sleep(0)
    asker = judge.for_method()
    late = asyncio.create_task(asker.ask(second))
    await asyncio.sleep(0)
    await asyncio.to_thread(lost.open)
    assert (await held, await late) == (0, 1)
    assert [call.attempts for call in asker.drain()] == [1]


@played
async def test_servers_end_the_wait(two, caplog):
    judge = two.judge(1, wait=0.3, max_retries=1)
    questions = at_home(judge, two.lost, 3)
    await calls(judge, questions)
    await asyncio.to_thread(two.lost.close)
    for attempts in (2 + 1, 2):  # with retries, and once more after the wait; then at once
        assert await judge.ask_all(questions) == [None] * 3
        made = judge.drain()
        assert {(call.outcome, call.attempts) for call in made} == {("unreachable", attempts)}
        assert all("Connect" in call.error for call in made)
    assert len(log(caplog)) == 2
    assert log(caplog)[1] == "no judge server was back within 0.3 s, so questions fail now"


@played
async def test_servers_end_the_wait_when_they_are_told(two, caplog):
    judge = two.judge(1, wait=FOR_EVER)
    questions = at_home(judge, two.lost, 3)
    await calls(judge, questions)
    await asyncio.to_thread(two.lost.close)
    asked = asyncio.create_task(judge.ask_all(questions))
    while not log(caplog):
        await asyncio.sleep(0)
    judge.client.end_waits()
    assert await asked == await judge.ask_all(questions) == [None] * 3
    await asyncio.to_thread(two.lost.open)
    await until(judge, questions[0], two.lost)
    await asyncio.to_thread(two.lost.close)
    assert await judge.ask(questions[0]) is None, "nor in the next outage"


@pytest.mark.parametrize("number", [1, 2])
@played
async def test_servers_that_were_never_there_are_not_waited_for(two, number):
    judge = two.judge(number, wait=FOR_EVER)
    (question,) = at_home(judge, two.lost, 1)
    for server in two.both:
        await asyncio.to_thread(server.close)
    with pytest.raises(JudgeError, match=r"failed its first question, so nothing was started.*Connect"):
        await judge.first_question(question)


@pytest.mark.parametrize("number", [1, 2])
@played
async def test_servers_give_up_a_question_that_kills_them_again_and_again(two, number):
    judge = two.judge(number, wait=FOR_EVER)
    good, deadly = at_home(judge, two.lost, 2)
    await judge.ask(good)
    for server in two.both:
        server.fault = status(504)
    assert await judge.ask(deadly) is None
    asked = two.lost.asked + two.other.asked - 1
    assert 1 + HOLDS <= asked <= number * (1 + HOLDS) + number - 1
    for server in two.both:
        server.fault = None
    assert await judge.ask(good) == 0


@played
async def test_servers_do_not_wait_for_a_single_busy_one(two, caplog):
    judge = two.judge(1, wait=FOR_EVER, max_retries=1)
    (question,) = at_home(judge, two.lost, 1)
    await judge.ask(question)
    two.lost.fault = status(429)
    assert await judge.ask(question) is None
    assert log(caplog) == []


def test_servers_that_are_waited_for_end_with_the_time_of_a_step(two, tmp_path):
    judge = two.judge(1, wait=FOR_EVER)
    scorer = GroupScorer(RankBuffer(), judge, BufferStore(tmp_path / "store.sqlite"), step_timeout=PATIENCE)
    query = Query("rice", [{"role": "user", "content": "Rice?"}], (Rubric("Says: rinse, boil.", 1),), tuple("abcd"))
    group = RolloutGroup(query, (Rollout(0, "Rinse."), Rollout(1, "Rinse, boil.")), 0, 0)
    try:
        scorer.first_question(query)
        two.lost.close()
        scorer.step_timeout = 0.5
        with pytest.raises(JudgeError, match=r"did not finish a step within judge_step_timeout=0\.5 s"):
            scorer.score([group], 0)
        assert list(scorer.store.rows("SELECT DISTINCT outcome FROM calls")) == [("cancelled",)]
    finally:
        scorer.close()


# The look at a server that is down


@played
async def test_servers_look_with_the_requests_that_a_server_takes(two):
    """Servers exist that refuse `max_tokens`; what `judge_request` says of it holds for the look, too."""
    lost, judge = two.lost, two.judge(request={"max_tokens": None, "max_completion_tokens": 50})
    (question,) = at_home(judge, lost, 1)
    lost.fault = first(1, status(503))
    await calls(judge, [question])
    await until(judge, question, lost)
    assert {(asked.get("max_tokens"), asked["max_completion_tokens"]) for asked in lost.seen} == {(None, 50)}
    assert lost.pings


@played
async def test_servers_see_that_the_served_rubric_judge_is_back(two):
    lost, judge = two.lost, two.judge()
    (question,) = at_home(judge, lost, 1)
    await asyncio.to_thread(lost.close)
    await calls(judge, [question])
    with served(make_app(), lost.port):
        await until(judge, question, lost)


@played
async def test_servers_look_once_at_a_time_and_not_after_the_end(two):
    lost, judge = two.lost, two.judge()
    questions = at_home(judge, lost, 9)
    lost.fault, lost.pong = first(9, status(503)), hang
    for _ in range(3):
        await judge.ask_all(questions)
    while not lost.pings:
        await asyncio.sleep(0)
    await judge.ask_all(questions)
    assert (lost.pings, lost.in_flight) == (1, 1)
    await judge.client.close()
    while lost.in_flight:
        await asyncio.sleep(0)
    assert lost.pings == 1


# What is in flight


@played
async def test_servers_have_a_limit_of_what_is_in_flight_each(two):
    judge = two.judge(concurrency=3)
    questions = [question for server in two.both for question in at_home(judge, server, 12)]

    def gate(opened: asyncio.Event) -> Handler:  # of the server's own loop
        async def wait(request: web.Request, n: int) -> None:
            if n >= 3:
                opened.set()
            await opened.wait()

        return wait

    for server in two.both:
        server.fault = gate(asyncio.Event())
    await judge.ask_all(questions)
    assert [(server.asked, server.most_in_flight) for server in two.both] == [(12, 3), (12, 3)]
    assert {call.outcome for call in judge.drain()} == {"parsed"}


@played
async def test_servers_keep_the_limit_where_one_takes_over(two):
    judge = two.judge(concurrency=3)
    await asyncio.to_thread(two.lost.close)
    await calls(judge, at_home(judge, two.lost, 12))
    assert two.other.asked == 12 and two.other.most_in_flight <= 3
