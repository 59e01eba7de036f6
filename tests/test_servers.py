"""Several judge servers: a query stays with its own, moves when that one dies, returns with it, and loses nothing.

`Servers` is compared with its rules on servers in memory. Which fault of a server is `down`, `busy` or `refused`, and
what a look at a server takes for an answer, is in `test_faults.py`. The limit of what is in flight is in
`test_judge.py`, and a training run whose servers are killed and started again in `test_servers_in_training.py`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest
from conftest import group, numbers, order, servers
from helpers.judges import Remote, Window
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.judge import Judge, JudgeError, Question, insertion_question
from rankbuffer_trl.judge import _servers as module
from rankbuffer_trl.judge._servers import HOLDS, Servers
from rankbuffer_trl.training._first import first_question

PATIENCE = 30.0  # seconds for what should happen at once
FOR_EVER = 1e9
RETRIES = Remote.retries
URLS = st.lists(st.integers(1, 999).map("http://judge-{}/v1".format), min_size=1, max_size=6, unique=True)
FOUR = [f"http://127.0.0.1:{port}/v1" for port in (8001, 8002, 8003, 8004)]


@given(st.data(), URLS, st.text(max_size=20))
def test_order_is_the_querys_own_and_without_a_server_that_of_the_others(data, urls, query_id):
    preferred = order(servers(*urls), query_id)
    assert sorted(preferred) == sorted(urls)
    assert order(servers(*data.draw(st.permutations(urls))), query_id) == preferred
    gone = data.draw(st.sampled_from(urls))
    assert order(servers(*(url for url in urls if url != gone)), query_id) == [u for u in preferred if u != gone]


def test_order_spreads_the_load_and_that_of_a_server_that_goes():
    pairs = Counter(tuple(order(servers(*FOUR), f"query-{i}")[:2]) for i in range(1000))
    assert len(pairs) == 12 and all(40 <= n <= 130 for n in pairs.values()), "83 on average"


# Servers in memory


def played(play: Callable, *numbers: int, **kwargs) -> None:
    """Run `play(judge, lines, *clients)` on an event loop for each number of servers. `lines` is the log."""

    async def run(number: int) -> None:
        lines, clients = [], [Remote(i) for i in range(number)]
        judge = Judge(Servers(clients, **{"probe_every": 0} | kwargs), max_attempts=1)
        log = SimpleNamespace(warning=lambda text, *args: lines.append(text % args))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "logger", log)
            async with asyncio.timeout(PATIENCE):
                await play(judge, lines, *clients)
                await judge.client.close()
        assert {client.state for client in clients} == {"closed"}

    for number in numbers:
        asyncio.run(run(number))


def question(id: str) -> Question:
    return insertion_question(numbers(id), ("10", "20"), "15")


def at_home(judge: Judge, client: Remote, number: int) -> list[Question]:
    """Questions about `number` queries that prefer a server."""
    ids = (id for id in map("query-{}".format, count()) if judge.client.order(id)[0] is client)
    return [question(next(ids)) for _ in range(number)]


async def ask(judge: Judge, *questions: Question) -> set[tuple[str, str, int]]:
    """Ask all at once: how they ended, where, after how many requests."""
    asker = judge.for_method()
    verdicts = await asker.ask_all(questions)
    assert verdicts.count(1) == sum(not call.failed for call in asker.calls) == len(verdicts) - verdicts.count(None)
    return {(call.outcome, call.server, call.attempts) for call in asker.calls}


async def until(condition: Callable) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def show(lines: list[str], client: Remote) -> None:
    """Let a probe see that a server is up."""
    client.shown, known = True, len(lines)
    await until(lambda: BACK.format(client.url) in lines[known:])
    client.shown = False


DOWN, BACK = "the judge server {0} is down, {what}: {0} is down", "the judge server {} is back"
MOVES, ALONE = "its queries move to another one", "there is no other one"
WAITS = "questions wait up to {:g} s for one that answers"


@dataclass
class Rules:
    """What `Servers` promises: where a question ends, after how many requests, and what the log says."""

    number: int
    wait: float
    down: list[Remote] = field(default_factory=list)
    answered: bool = False
    said: list[str] = field(default_factory=list)

    def holds(self) -> bool:
        return len(self.down) == self.number and self.answered and self.wait > 0

    def asked(self, client: Remote, retries: int) -> int:
        """How many requests that takes."""
        if client.state == "up":
            self.answered = True
            if client in self.down:
                self.down.remove(client)
                self.said.append(BACK.format(client.url))
        if client.state == "down" and client not in self.down:
            self.down.append(client)
            what = MOVES if len(self.down) < self.number else WAITS.format(self.wait) if self.holds() else ALONE
            self.said.append(DOWN.format(client.url, what=what))
        extra = 1 + RETRIES if not retries else RETRIES  # a busy one always gets its retries
        return 1 + (extra if client.state == "busy" else retries if client.state == "down" else 0)

    def ask(self, order: list[Remote]) -> tuple[Remote | None, int]:
        requests = 0
        for client in order if self.number > 1 else ():
            if client not in self.down:
                requests += self.asked(client, 0)
                if client.state != "down":
                    return client, requests
        if not self.holds():
            requests += self.asked(order[0], RETRIES)
        return (None if self.holds() else order[0]), requests


STATES = st.tuples(st.integers(0, 2), st.sampled_from(["up", "down", "down", "busy", "refused"]))
EVENTS = st.lists(st.tuples(st.integers(0, 9), st.just("ask")) | STATES | st.just((0, "look")))
OUTAGE = [(0, "ask"), (0, "down"), (1, "down"), (0, "ask"), (1, "ask"), (1, "up"), (0, "look"), (0, "ask")]

NEVER_THERE = [(0, "down"), (1, "down"), (0, "ask")]  # nobody waits for what has never answered


@given(st.integers(1, 3), st.sampled_from([0.0, FOR_EVER]), EVENTS)
@example(2, FOR_EVER, OUTAGE)
@example(1, FOR_EVER, NEVER_THERE)
@example(2, FOR_EVER, NEVER_THERE)
def test_servers_go_by_their_rules(number, wait, events):
    async def play(judge, lines, *clients):
        rules, waiting = Rules(number, wait), []

        async def check(task, client: Remote, requests: int) -> None:
            outcome = "parsed" if client.state == "up" else "unreachable"
            assert await task == {(outcome, client.name, requests)}

        for which, what in events:
            if what == "ask":
                order = judge.client.order(f"q{which}")
                task = asyncio.create_task(ask(judge, question(f"q{which}")))
                client, requests = rules.ask(order)
                if client is None:
                    waiting.append((task, requests))
                    await until(lambda: len(lines) == len(rules.said))
                    await asyncio.sleep(0)
                else:
                    await check(task, client, requests)
            elif what == "look":
                for client in [client for client in rules.down if client.state == "up"]:
                    await show(lines, client)
                    rules.asked(client, 0)
                    for task, requests in waiting:
                        await check(task, client, requests + 1)
                    waiting.clear()
            else:
                clients[which % number].state = what
            assert lines == rules.said
        for task, *_ in waiting:
            task.cancel()

    played(play, number, wait=wait)


def test_servers_answer_what_was_in_flight_at_one_that_dies_and_look_at_it_once_at_a_time():
    async def play(judge, lines, lost, other):
        lost.state, questions = "hanging", at_home(judge, lost, 9)
        asked = asyncio.create_task(ask(judge, *questions))
        await until(lambda: lost.in_flight == 9)
        lost.dies.set()
        assert await asked == {("parsed", other.name, 2)} and len(lines) == 1
        lost.dies.clear()
        (probe,) = asyncio.all_tasks() - {asyncio.current_task()}
        looks = lost.looks
        await until(lambda: lost.looks > looks)
        assert await ask(judge, *questions) == {("parsed", other.name, 1)} and lost.looks == looks + 1
        await judge.client.close()
        await asyncio.wait([probe])
        assert lost.looks == looks + 1, "nor after the end"

    async def seldom(judge, lines, lost, other):
        lost.state = "down"
        for _ in range(3):
            await ask(judge, *at_home(judge, lost, 3))
        assert (lost.asked, lost.looks) == (3, 0)

    played(play, 2)
    played(seldom, 2, probe_every=FOR_EVER)


def test_servers_end_a_wait_after_its_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def play(judge, lines, lost):
        for outage in range(2):
            assert await ask(judge, *(questions := at_home(judge, lost, 3))) == {("parsed", lost.name, 1)}
            lost.state, lines[:] = "down", []
            for requests in (1 + RETRIES + 1, 1 + RETRIES):  # once more after the wait; then at once
                assert await ask(judge, *questions) == {("unreachable", lost.name, requests)}, outage
                clock[0] += 0.1
            over = "no judge server was back within 0.1 s, so questions fail now"
            assert lines == [DOWN.format(lost.url, what=WAITS.format(0.1)), over]
            lost.state = "up"

    played(play, 1, wait=0.1)


def test_servers_hold_all_questions_at_a_limit_of_requests_as_long_as_some_are_answered():
    async def play(judge, lines, client):
        await ask(judge, question("first"))
        client.complete = Window(client).complete
        ends = await ask(judge, *(question(f"q{i}") for i in range(HOLDS * 5)))
        assert {outcome for outcome, *_ in ends} == {"parsed"}
        assert lines[0].startswith(f"the judge server {client.url} is at its limit, questions wait up to ")
        assert client.looks == 0, "a probe is one request more"
        del client.complete
        lines.clear()
        client.state, judge.client.wait = "limited", 0.05
        assert {outcome for outcome, *_ in await ask(judge, question("q"))} == {"unreachable"}
        assert not lines, "one question alone is no limit for the others"
        assert {outcome for outcome, *_ in await ask(judge, question("q"), question("r"))} == {"unreachable"}

    played(play, 1, wait=FOR_EVER)


def test_servers_that_are_waited_for_end_with_the_time_of_a_step(scorer):
    client = Remote(0)
    made = scorer(Judge(Servers([client], wait=FOR_EVER), max_attempts=1), step_timeout=PATIENCE)
    first_question(made, numbers())
    client.state, made.step_timeout = "down", 0.5
    with pytest.raises(JudgeError, match=r"did not finish a step within judge_step_timeout=0\.5 s"):
        made.score([group(numbers(), "5 15", 0)], 0)
    assert list(made.store.rows("SELECT DISTINCT outcome FROM calls")) == [("cancelled",)]


@pytest.mark.parametrize(("status", "gone"), [(404, True), (None, True), (425, True), (500, True), (400, False)])
def test_a_server_that_has_answered_and_gives_no_token_any_more_is_down(status, gone):
    async def restarts(judge, lines, client):
        client.state, client.status = "refused", status
        assert await ask(judge, question("a")) == {("unreachable", client.name, 1)}, "it never answered: no wait"
        client.state = "up"
        await ask(judge, question("a"))
        client.state = "refused"
        task = asyncio.create_task(ask(judge, question("b")))
        if gone:
            await until(lambda: lines)
            client.state = "up"
            await show(lines, client)
        assert await task == {("parsed" if gone else "unreachable", client.name, 1 + gone)}

    played(restarts, 1, wait=FOR_EVER)


def test_servers_give_up_a_question_that_kills_them_again_and_again():
    async def deadly(judge, lines, *clients):
        good, bad = at_home(judge, clients[0], 2)
        await ask(judge, good)
        for client in clients:
            client.alive, client.state = always, "down"
        ((end, _, requests),) = await ask(judge, bad)
        least = 1 + RETRIES * (len(clients) == 1) + HOLDS
        assert HOLDS == 3 and end == "unreachable" and least <= requests < len(clients) * (least + 1)

    async def always() -> bool:
        return True

    played(deadly, 1, 2, wait=FOR_EVER)
