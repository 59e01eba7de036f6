"""Rewards over HTTP: single groups leave what training leaves, whatever arrives at once, is sent again, or ends."""

import asyncio
import json
import os
import random
import re
import signal
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock, patch

import httpx
import pytest
from aiohttp import web
from conftest import QUICKSTART, by_number, group, numbers, scripted_judge, unreachable
from helpers.contents import contents
from helpers.forks import fork, wait
from helpers.servers import served

from rankbuffer_tools.service import command
from rankbuffer_tools.service.groups import ConflictError, SingleGroups
from rankbuffer_tools.service.server import (
    MOST_BYTES,
    MOST_CHARACTERS,
    MOST_TEXTS,
    GroupRequest,
    GroupServer,
    is_loopback,
)
from rankbuffer_trl.data.queries import GENERIC, QueryTable, generic_row, load_queries
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Judge, JudgeError, RubricJudge
from rankbuffer_trl.judge.errors import TransportError
from rankbuffer_trl.judge.openai_client import OpenAIClient
from rankbuffer_trl.rewards.format import AnswerReader
from rankbuffer_trl.rewards.method import load_method
from rankbuffer_trl.rewards.rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store.places import LIVE_STORE

pytestmark = pytest.mark.usefixtures("cache")

QUERY = {
    "query_id": "tea",
    "prompt": "How long does tea steep?",
    "rubrics": [{"text": "Says how long to wait: three minutes.", "weight": 5}],
    "responses": ["no", "tea", "wait", "Wait three minutes."],
}
TEXTS = ["Wait three minutes.", "wait three", "", "no idea"]


@pytest.fixture
def single(tmp_path):
    """Make `SingleGroups`, each with its own store or that of another one, which is closed then."""
    made = []

    def make(answer=by_number, again: SingleGroups | None = None, method=None, **limits) -> SingleGroups:
        if again is not None:
            made.remove(again)
            asyncio.run(again.close())
        path = tmp_path / f"single-{len(made)}.sqlite" if again is None else again.store.path
        made.append(SingleGroups(method or RankBuffer(), scripted_judge(answer, max_attempts=1), path, **limits))
        return made[-1]

    yield make
    for each in made:
        asyncio.run(each.close())


def score_all(groups: SingleGroups, visits: list[tuple[str, str]], steps: bool) -> list:
    """Post groups at once: the queries by their names, and texts in one line. The steps count from 0."""

    async def post():
        each = (
            groups.score(one.query, [r.text for r in one.rollouts], one.step if steps else None)
            for one in (group(numbers(id), line, step) for step, (id, line) in enumerate(visits))
        )
        return await asyncio.gather(*each)

    return asyncio.run(post())


def test_single_groups_at_once_leave_what_a_scorer_leaves_one_by_one(single, scorer):
    luck = random.Random(0)
    visits = [
        (luck.choice("abc"), " ".join(str(n) if n else "-" for n in luck.choices(range(60), k=5))) for _ in range(24)
    ]
    oracle = scorer(scripted_judge(by_number))
    known = [oracle.score([group(numbers(id), line, step)], step) for step, (id, line) in enumerate(visits)]
    for steps in (True, False):
        groups = single()
        outcomes = score_all(groups, visits, steps)
        assert [one.rewards for one in outcomes] == [one.scores[0].rewards for one in known]
        assert [one.order for one in outcomes] == [one.scores[0].order for one in known]
        assert sorted(one.step for one in outcomes) == [*range(24)]
        if steps:
            assert contents(groups.store) == contents(oracle.store)
        assert groups.store.spent == oracle.store.spent
        assert not groups._visits, "no lock is left"


def test_score_counts_the_visits_of_a_query_whatever_the_method(single):
    for name in ("rankbuffer", "pointwise"):
        groups = single(lambda messages: RubricJudge().answer(messages)[0], method=load_method(name, {}, 0))
        score_all(groups, [("a", "5 6"), ("b", "5 6"), ("a", "7 8"), ("a", "9 1")], steps=True)
        found = list(groups.store.rows("SELECT query_id, epoch FROM groups ORDER BY step"))
        assert found == [("a", 0), ("b", 0), ("a", 1), ("a", 2)], name


def test_score_knows_what_is_recorded(single):
    def ask(groups: SingleGroups, line: str, step: int | None, training: bool = True):
        one = group(numbers(), line, 0)
        return asyncio.run(groups.score(one.query, [rollout.text for rollout in one.rollouts], step, training))

    def calls(groups: SingleGroups) -> int:
        return len(contents(groups.store, ["calls"])["calls"])

    groups = single()
    first, second = ask(groups, "5 - 50 15", 3), ask(groups, "6 7 8 9", 7)
    assert (first.step, second.step) == (3, 7)
    groups = single(again=groups)  # a new process
    asked = calls(groups)
    assert ask(groups, "5 - 50 15", 3) == first and ask(groups, "6 7 8 9", 7) == second
    assert ask(groups, "6 7 8 9", None) == second, "without a step, the last group counts"
    assert calls(groups) == asked, "nothing was asked again"
    for line, step in (("5 - 50 16", 3), ("5 - 50", 3), ("1 2 3 4", 6), ("5 - 50 15", 7)):
        with pytest.raises(ConflictError, match=f"has a group of step 7, so other texts of step {step} are refused"):
            ask(groups, line, step)
    ranked = ask(groups, "5 - 50 15", 3, training=False)
    assert calls(groups) > asked and len(ranked.rewards) == 4
    assert ask(groups, "5 - 50 15", None).step == 8, "it is not the last group, so it is a new visit"
    asyncio.run(groups.rewind(7))
    assert ask(groups, "1 2 3 4", 7).step == 7
    run = asyncio.run(groups.run_id())
    asyncio.run(groups.rewind(0))
    assert asyncio.run(groups.run_id()) not in ("", run) and contents(groups.store)["groups"] == []
    # The numbers are those of the store, as in a new process: only a recorded group uses one up.
    assert [ask(groups, "1 2 3 4", None).step, ask(groups, "5 6 7 8", None).step] == [0, 1]
    assert [ask(groups, "1 2 3 4", None, training=False).step for _ in range(2)] == [2, 2]
    groups.judge.client.answer = unreachable
    with pytest.raises(JudgeError):
        ask(groups, "1 2 3 4", None)
    groups.judge.client.answer = by_number
    assert ask(groups, "1 2 3 4", None).step == 2


def test_a_restart_knows_the_query_of_each_recorded_group(single):
    other = {"prompt": [{"role": "user", "content": "another"}]}

    def ask(step: int, fits: bool = True, training: bool = True, **change):
        with nullcontext() if fits else pytest.raises(ConflictError, match="'a' had another prompt, other rubrics"):
            asyncio.run(groups.score(replace(numbers("a"), **change), ["5", "6"], step, training))

    groups = single(unreachable)
    with pytest.raises(JudgeError):
        ask(0, **other)
    groups.judge.client.answer = by_number
    with patch.object(groups.store, "commit", side_effect=StoreError("full")), pytest.raises(StoreError):
        ask(0, **other)
    ask(9, training=False, **other)
    ask(0)  # neither a group that failed nor an evaluation binds a later one
    notes = groups.store.path.with_suffix(".queries")
    notes.write_text(notes.read_text() + '\n["b", "cut')  # by a power cut
    groups = single(again=groups)
    for change in (other, {"responses": numbers().responses[:-1]}, {"rubrics": GENERIC}):
        ask(1, fits=False, **change)
    ask(1)
    for step, fits in ((1, False), (0, True)):
        asyncio.run(groups.rewind(step))
        ask(1, fits, **other)
    groups = single(again=groups)
    ask(2, fits=False)
    notes.unlink()  # as of a store from before there were notes
    groups = single(again=groups)
    ask(2)


def test_an_evaluation_waits_for_no_group(single):
    groups = single()
    complete = groups.judge.client.complete

    async def play() -> list[int]:
        asked, gate = asyncio.Event(), asyncio.Event()

        async def gated(messages, **question):
            asked.set()
            await gate.wait()
            return await complete(messages, **question)

        groups.judge.client.complete = gated
        visit = asyncio.create_task(groups.score(numbers(), ["5", "6"]))
        await asked.wait()
        groups.judge.client.complete = complete
        evaluation = await asyncio.wait_for(groups.score(numbers(), ["7", "8"], training=False), 60)
        assert not visit.done()
        gate.set()
        return [(await visit).step, evaluation.step]

    assert asyncio.run(play()) == [0, 1]


def test_a_group_that_fails_leaves_its_calls_alone(single, monkeypatch):
    answers = iter([unreachable] * 9)
    groups = single(lambda messages: next(answers, by_number)(messages))
    with pytest.raises(JudgeError, match="failed 2 of"):
        score_all(groups, [("a", "5 6 7")], steps=True)
    left = contents(groups.store)
    assert left["calls"] and not (left["groups"] or left["buffers"] or left["responses"])
    answers = iter(())
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        patch.setattr(groups.store, "commit", Mock(side_effect=StoreError("the disk is full")))
        score_all(groups, [("a", "5 6 7")], steps=True)
    assert score_all(groups, [("a", "5 6 7")], steps=True)[0].rewards == (-1, 0, 1)
    slow, asked = single(timeout=0.01), []

    async def never(messages, *, question, seed, tally):
        tally.attempts += 1
        asked.append(question)
        if len(asked) == 6:
            scoring.cancel()
        await asyncio.Event().wait()

    slow.judge.client.complete = never
    with pytest.raises(JudgeError, match="did not finish"):
        score_all(slow, [("a", "5 6 7")], steps=True)
    slow.limits = (1.0, None)
    loop = asyncio.new_event_loop()
    scoring = loop.create_task(slow.score(numbers("b"), ["5", "6", "7"]))
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(scoring)
    assert not asyncio.all_tasks(loop)
    loop.close()
    assert Counter((row[4], row[6]) for row in contents(slow.store)["calls"]) == {
        ("a", "cancelled"): 3,
        ("b", "cancelled"): 3,
    }


# Over HTTP


@pytest.fixture
def serve(single):
    """Serve groups over HTTP: gives a function that posts."""

    @contextmanager
    def start(groups: SingleGroups, token: str = "", queries: QueryTable | None = None):
        server = GroupServer(groups, AnswerReader(), queries, token)
        with served(server.app()) as url, httpx.Client(base_url=url, timeout=60) as client:

            def post(path: str = "groups", headers: dict | None = None, content: bytes | None = None, **body):
                named = {"Content-Type": "application/json"} | (headers or {})
                sent = json.dumps(body).encode() if content is None else content
                answer = client.post(f"/v1/{path}", content=sent, headers=named)
                return answer.status_code, answer.json()

            yield SimpleNamespace(post=post, client=client, server=server)

    return start


def test_metrics_count_groups_and_tokens_for_those_who_may_ask(single, serve):
    groups = single(lambda messages: RubricJudge().answer(messages)[0])
    with serve(groups, token="a-token") as http:
        mine = {"headers": {"Authorization": "Bearer a-token"}}
        assert http.client.get("/metrics").status_code == 401
        assert [http.post(**QUERY, texts=TEXTS, **mine)[0] for _ in range(2)] == [200, 200]
        assert [http.post(**QUERY, texts=[], **mine)[0], http.post(**QUERY, texts=TEXTS)[0]] == [400, 401]
        answer = http.client.get("/metrics", **mine)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'([a-z_]+(?:\{[a-z]+="\w+"\})?) ([0-9.]+)')
    lines = [line for line in answer.text.splitlines() if not line.startswith("# ")]
    found = {name: float(value) for name, value in (sample.fullmatch(line).groups() for line in lines)}
    counts = {code: found[f'rankbuffer_groups_total{{status="{code}"}}'] for code in (200, 400, 401)}
    assert counts == {200: 2, 400: 1, 401: 1} and found["rankbuffer_open_groups"] == 0
    assert found["rankbuffer_group_seconds_count"] == 4 and found["rankbuffer_group_seconds_sum"] > 0
    spent = groups.store.spent
    assert spent.spent_prompt_tokens > 0 and {
        kind: found[f'rankbuffer_judge_tokens_total{{kind="{kind}"}}'] for kind in ("prompt", "cached", "completion")
    } == {
        "prompt": spent.spent_prompt_tokens,
        "cached": spent.spent_cached_tokens,
        "completion": spent.spent_completion_tokens,
    }


def test_a_server_refuses_in_one_line_and_records_nothing(single, serve, caplog, monkeypatch):
    groups, long = single(lambda messages: RubricJudge().answer(messages)[0]), "x" * (MOST_CHARACTERS + 1)
    whole = QUERY | {"texts": TEXTS}
    with serve(groups) as http:
        for status, part, change in (
            (400, "there is no field 'text'; the fields are texts, query_id", {"text": TEXTS}),
            (400, "it has no 'texts'", {"content": b"{}"}),
            (400, "the body must be an object, got a list", {"content": b"[1]"}),
            (400, "the body is cut short or not JSON", {"content": b"{"}),
            (400, "the body is cut short or not JSON", {"content": b"[" * 100_000}),
            (400, "texts[1] must be a text, got 3", {"texts": ["a", 3]}),
            (400, f"texts must be 1 to {MOST_TEXTS} texts", {"texts": []}),
            (400, f"texts must be 1 to {MOST_TEXTS} texts", {"texts": ["x"] * (MOST_TEXTS + 1)}),
            (400, "at most 200,000 characters", {"texts": ["x", long]}),
            (400, "step must be from 0 to", {"step": -1}),
            (400, "step must be from 0 to", {"step": 10**18}),
            (400, "train must be true or false", {"train": 1}),
            (400, "must have text and weight", {"rubrics": ["Is good."]}),
            (400, "responses must hold at least 4 responses", {"responses": ["one"]}),
            (400, "prompt must be a text or a list of messages", {"prompt": None}),
            (403, "serves 127.0.0.1 and localhost alone", {"headers": {"Host": "rebound.example:8002"}}),
            (403, "serves 127.0.0.1 and localhost alone", {"headers": {"Host": "127.0.0.1.example"}}),
            (404, "404: Not Found", {"path": "nothing"}),
            (409, f"not {'0' * 32!r}", {"run": "0" * 32}),
            (413, "Maximum request body size", {"content": b" " * (MOST_BYTES + 1)}),
            (415, "must be application/json", {"headers": {"Content-Type": "text/plain"}}),
        ):
            found, answer = http.post(**whole | change)
            assert (found, [*answer]) == (status, ["error"]) and part in answer["error"], (change, found, answer)
            assert "\n" not in answer["error"]
        assert "a bug in" not in caplog.text
        for bug in (ZeroDivisionError, TimeoutError):
            with monkeypatch.context() as patch:
                patch.setattr(groups, "score", Mock(side_effect=bug))
                said = {"error": "an error inside rankbuffer-serve; its log has the traceback"}
                assert http.post(**whole) == (500, said) and bug.__name__ in caplog.text
        assert not contents(groups.store)["groups"] and http.server.open == 0
        status, answer = http.post(**whole, step=4)
        run = http.client.get("/health").json()["run"]
        assert (status, answer["run"], answer["query_id"], answer["step"]) == (200, run, "tea", 4)
        assert answer["rewards"] == pytest.approx([1, -1 / 3, -1, 1 / 3]) and answer["order"] == [[1], [3], [0]]
        assert http.post(**whole, step=4, run=run) == (200, answer)
        assert http.post(**whole | {"texts": TEXTS[:3]}, step=4)[0] == 409
        other = {"prompt": "How long?", "rubrics": [{"text": "Is short.", "weight": 5}], "responses": [*"abcd"]}
        for field, train in product(other, (True, False)):
            status, found = http.post(**whole | {field: other[field], "train": train, "step": 4})
            assert status == 409 and "'tea' had another prompt, other rubrics or other responses" in found["error"]
        gate = threading.Event()
        groups._thread.submit(gate.wait)  # as a commit does that waits for a reader of the file
        try:
            assert http.client.get("/health", timeout=30).json()["run"] == run
        finally:
            gate.set()
        groups.judge.client.answer = unreachable
        status, answer = http.post(**whole, step=5)
        assert status == 502 and "more than judge_max_failures=0.25" in answer["error"]
        assert answer["error"].endswith("Nothing of this group was recorded: post it again.")
        assert [row[1] for row in contents(groups.store)["groups"]] == [4]
        assert http.post("rewind", step=4)[0] == 200 and not contents(groups.store)["groups"]
        groups.judge.client.answer = lambda messages: RubricJudge().answer(messages)[0]
        assert http.post(**whole | other)[0] == 200, "a rewind forgets the query"
        generic_row.cache_clear()
        plain = {"prompt": "Why?", "responses": [*"abcd"], "texts": TEXTS}
        assert [http.post(**plain, query_id=id)[0] for id in "ab"] == [200, 200]
        assert caplog.text.count("a group has no rubrics, so the judge goes by five") == 1
    assert GroupRequest(["x" * MOST_CHARACTERS] * MOST_TEXTS)


def test_a_rewind_and_a_group_at_once_keep_runs_apart(single):
    def request(**body):
        return SimpleNamespace(content_type="application/json", read=AsyncMock(return_value=json.dumps(body).encode()))

    async def play(first: str):
        groups = single(lambda messages: RubricJudge().answer(messages)[0])
        server = GroupServer(groups, AnswerReader())
        await server._score(request(**QUERY, texts=TEXTS))
        old = await groups.run_id()
        both = {
            "group": server._score(request(**QUERY | {"query_id": "late"}, texts=TEXTS, run=old)),
            "rewind": server._rewind(request(step=0)),
        }
        names = sorted(both, key=first.__ne__)
        ends = await asyncio.gather(*(both[name] for name in names), return_exceptions=True)
        refused = [name for name, end in zip(names, ends, strict=True) if isinstance(end, ConflictError)]
        recorded = [row[0] for row in contents(groups.store)["groups"]]
        return refused, recorded, await groups.run_id() == old, server.open

    assert asyncio.run(play("group")) == (["rewind"], ["late", "tea"], True, 0)
    assert asyncio.run(play("rewind")) == (["group"], [], False, 0)


def test_read_takes_a_body_that_is_cut_off_for_a_fault_of_the_client(single):
    server = GroupServer(single(), AnswerReader())
    for fault in (ConnectionResetError("gone"), web.RequestPayloadError("no gzip")):
        request = SimpleNamespace(content_type="application/json", read=AsyncMock(side_effect=fault))
        with pytest.raises(web.HTTPBadRequest) as refusal:
            asyncio.run(server._read(request, GroupRequest))
        assert refusal.value.text == "the body was cut off, or cannot be decoded"


def test_a_server_with_a_token_and_a_data_set(single, serve, rows, howto):
    groups = single(lambda messages: RubricJudge().answer(messages)[0])
    known, texts = howto[0], howto[1]["responses"]
    with serve(groups, "s3cret-ü", QueryTable(rows, 4)) as http:
        posts = ({"query_id": known["query_id"], "texts": texts}, {"path": "rewind", "step": 0})
        for sent, body in product(("", "s3cret-ü", "Bearer s3cret-u", "Bearer s3cret-üx"), posts):
            status, answer = http.post(**body, headers={"Authorization": sent.encode()} if sent else {})
            assert status == 401 and "s3cret" not in str(answer), (sent, body)
        assert http.client.get("/health").json()["status"] == "ok"
        right = {"Authorization": "Bearer s3cret-ü".encode(), "Host": "judge.example"}
        status, by_id = http.post(query_id=known["query_id"], texts=texts, headers=right, step=1)
        assert status == 200 and sorted(i for tier in by_id["order"] for i in tier) == [*range(len(texts))]
        for status, part, body in (
            (404, "no query 'nobody'", {"query_id": "nobody"}),
            (404, "no query 'prompt-", {"prompt": "What?"}),
            (400, "leave them out", {"query_id": known["query_id"], "rubrics": known["rubrics"]}),
        ):
            found, answer = http.post(**body, texts=texts, headers=right)
            assert found == status and part in answer["error"]


def test_a_group_that_two_clients_post_at_once_is_judged_once(single, serve):
    groups = single(lambda messages: RubricJudge().answer(messages)[0])
    with serve(groups) as http, ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(http.post, **QUERY, texts=TEXTS, step=0) for _ in range(4)]
        answers = [each.result() for each in posts]
    assert answers[0][0] == 200 and all(each == answers[0] for each in answers)
    alone = single(lambda messages: RubricJudge().answer(messages)[0])
    with serve(alone) as http:
        http.post(**QUERY, texts=TEXTS, step=0)
    assert contents(groups.store) == contents(alone.store)


def test_a_host_that_others_reach_needs_a_token(monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", " t0ken ")
    for host, loopback in (
        ("127.0.0.1", 1),
        ("::1", 1),
        ("localhost", 1),
        ("0.0.0.0", 0),
        ("::", 0),
        ("a.b", 0),
        ("", 0),
    ):
        assert is_loopback(host) == bool(loopback), host
        with nullcontext() if loopback else pytest.raises(SettingsError, match="need a token"):
            command.ServeConfig(output_dir="out", host=host, token_env="NO_TOKEN").check_host()
        given = command.ServeConfig(output_dir="out", host=host, token_env="OTHER_TOKEN")
        given.check_host()
        assert given.token == "t0ken"


# As a process


def test_a_port_that_is_taken_ends_the_server_with_a_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as stop:
        command.main(["--output_dir", str(tmp_path), "--port", str(taken.getsockname()[1])])
    said = str(stop.value)
    assert said.startswith("rankbuffer-serve: cannot listen at 127.0.0.1, port ")
    assert said.endswith("name another port")
    BufferStore(tmp_path / LIVE_STORE).close()


def run_command(*words: object) -> None:
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # pytest has put others there
    command.main(["--port", "0", *map(str, words)])


@pytest.fixture
def process(tmp_path):
    """Start `rankbuffer-serve` in a fork, after `before`: gives its number, its address and its output."""
    started = []

    def start(*words: object, before=lambda: None):
        log = tmp_path / f"log-{len(started)}"
        os.mkfifo(log)

        pid = fork(lambda: (before(), run_command(*words)), log)
        lines = log.open()
        started.append((pid, lines))
        said = [next(lines, "")]
        while said[-1] and not said[-1].startswith("[serve] 127.0.0."):
            said.append(next(lines, ""))
        assert said[-1], f"it ended before it listened: {said}"
        _, host, _, port = said[-1].split(",")[0].split()
        return SimpleNamespace(pid=pid, url=f"http://{host}:{port}", said="".join(said), lines=lines)

    yield start
    for pid, lines in started:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        lines.close()


def test_a_kill_between_judge_and_commit_costs_one_more_post(process, tmp_path, howto):
    (tmp_path / "recipe.yaml").write_text("base: quickstart/quickstart.yaml\nrollout_timeout: 60\n")
    words = ("--config", tmp_path / "recipe.yaml", "--dataset_name", QUICKSTART / "howto.jsonl")
    words += ("--output_dir", tmp_path / "out", "--method_args", '{"k0": 3}')
    group = {"query_id": howto[0]["query_id"], "texts": howto[1]["responses"], "step": 5}

    def kill_at_commit():
        BufferStore.commit = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

    killed = process(*words, before=kill_at_commit)
    assert ", 36 queries, format_check none, run " in killed.said
    assert "[serve] not used here, from the recipe: recipe_queries_per_step, rollout_timeout\n" in killed.said
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{killed.url}/v1/groups", json=group, timeout=60)
    assert wait([killed.pid]) == [-signal.SIGKILL]
    second = process(*words)
    answer = httpx.post(f"{second.url}/v1/groups", json=group, timeout=60).json()
    assert len(answer["rewards"]) == len(group["texts"]) and answer["run"] in second.said
    refused = tmp_path / "refused"
    unasked = lambda: (setattr(command, "try_judge", None), run_command(*words))  # noqa: E731
    assert wait([fork(unasked, refused)]) == [1]
    assert (
        f"rankbuffer-serve: {tmp_path / 'out' / LIVE_STORE} is in use by process {second.pid}" in refused.read_text()
    )
    os.kill(second.pid, signal.SIGKILL)
    assert wait([second.pid]) == [-signal.SIGKILL]
    recorded = contents(tmp_path / "out")
    third = process(*words)
    assert httpx.post(f"{third.url}/v1/groups", json=group, timeout=60).json() == answer
    assert contents(tmp_path / "out") == recorded
    rows = load_queries(str(QUICKSTART / "howto.jsonl"))
    undisturbed = SingleGroups(RankBuffer(k0=3), Judge(RubricJudge()), tmp_path / "undisturbed.sqlite")
    asyncio.run(undisturbed.score(QueryTable(rows, 3)[group["query_id"]], group["texts"], 5))
    assert contents(undisturbed.store) == recorded
    asyncio.run(undisturbed.close())


def test_a_used_up_budget_ends_the_server_after_its_group_and_lets_none_start(process, tmp_path, howto):
    words = ("--config", QUICKSTART / "quickstart.yaml", "--dataset_name", QUICKSTART / "howto.jsonl")
    words += ("--output_dir", tmp_path / "out", "--judge_token_budget", 2000)
    server = process(*words)
    group = {"query_id": howto[0]["query_id"], "texts": howto[1]["responses"]}
    assert httpx.post(f"{server.url}/v1/groups", json=group, timeout=60).status_code == 200
    assert re.fullmatch(r"\[serve\] .* judge_token_budget=2,000: ends after 0 open groups\n", next(server.lines))
    assert wait([server.pid]) == [0]
    assert wait([fork(lambda: run_command(*words), tmp_path / "refused")]) == [1]
    assert "so nothing was started: raise the budget, or delete" in (tmp_path / "refused").read_text()
    store = BufferStore(tmp_path / "out" / LIVE_STORE)
    assert store.spent.spent_tokens > store.totals().spent_tokens, "the first question is in no ledger"
    store.close()


def test_a_sigterm_ends_the_wait_for_a_judge_that_is_down(process, tmp_path):
    async def complete(self, messages, *, question, seed, tally, retry=True):
        if question.query_id == "tea":
            print("tea is asked", flush=True)
            raise TransportError("connection refused", "down")
        return await RubricJudge().complete(messages, question=question, seed=seed, tally=tally)

    def one_that_dies():
        command.try_judge, OpenAIClient.complete = AsyncMock(), complete

    judge = ("--judge_url", "http://127.0.0.1:9/v1", "--judge_model", "mine", "--judge_wait", 10**6)
    running = process("--output_dir", tmp_path / "out", *judge, before=one_that_dies)

    def post(id: str) -> int:
        body = QUERY | {"query_id": id, "texts": TEXTS}
        return httpx.post(f"{running.url}/v1/groups", json=body, timeout=60).status_code

    assert post("coffee") == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, "tea")
        assert next(running.lines) == "tea is asked\n"
        os.kill(running.pid, signal.SIGTERM)
        assert waiting.result() == 502 and wait([running.pid]) == [0]


HALF_HEAD = "POST /v1/groups HTTP/1.1\r\nHost: localhost\r\n"
HALF_BODY = HALF_HEAD + 'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"texts":'


def half_request(url: str, sent: str) -> socket.socket:
    half = socket.create_connection(url.removeprefix("http://").split(":"), timeout=60)
    half.sendall(sent.encode())
    return half


def test_half_a_request_ends_by_itself(process, tmp_path, monkeypatch):
    monkeypatch.setattr("rankbuffer_tools.service.server.LONGEST_READ", 0.2)
    running = process("--output_dir", tmp_path / "out")
    for sent, said in ((HALF_HEAD, b""), (HALF_BODY, b"HTTP/1.1 408 ")):
        with half_request(running.url, sent) as half:
            assert half.recv(13) == said


def test_a_sigterm_ends_beside_a_silent_judge_and_half_requests(process, tmp_path, monkeypatch):
    complete = RubricJudge.complete

    async def silent(self, messages, *, question, seed, tally):
        if question.query_id == "tea":
            tally.attempts += 1
            print("tea is asked", flush=True)
            await asyncio.Event().wait()
        return await complete(self, messages, question=question, seed=seed, tally=tally)

    monkeypatch.setattr(RubricJudge, "complete", silent)
    monkeypatch.setattr("rankbuffer_tools.service.server.DRAIN", 0.5)
    # the process has 25 seconds in all; without its own limits, it waits for ever, or for 30 or 60 seconds
    running = process("--output_dir", tmp_path / "out", before=lambda: signal.alarm(25))
    with ThreadPoolExecutor(1) as pool, half_request(running.url, HALF_HEAD), half_request(running.url, HALF_BODY):
        post = pool.submit(httpx.post, f"{running.url}/v1/groups", json=QUERY | {"texts": TEXTS}, timeout=60)
        assert next(running.lines) == "tea is asked\n"
        os.kill(running.pid, signal.SIGTERM)
        assert wait([running.pid]) == [0] and post.result().status_code == 503
    left = contents(tmp_path / "out")
    assert {row[6] for row in left["calls"]} == {"cancelled"} and not left["groups"]


def test_a_sigterm_finishes_the_open_group(process, tmp_path):
    (asked, tell), (gate, open_gate) = os.pipe(), os.pipe()
    complete = RubricJudge.complete

    async def gated(self, messages, *, question, seed, tally):
        if question.query_id == "tea":
            os.write(tell, b".")
            await asyncio.get_running_loop().run_in_executor(None, os.read, gate, 1)
        return await complete(self, messages, question=question, seed=seed, tally=tally)

    def close_the_gate():
        RubricJudge.complete = gated

    running = process("--output_dir", tmp_path / "out", before=close_the_gate)
    assert ", queries from requests, format_check none, run " in running.said
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(httpx.post, f"{running.url}/v1/groups", json=QUERY | {"texts": TEXTS}, timeout=60)
        os.read(asked, 1)
        os.kill(running.pid, signal.SIGTERM)
        assert next(running.lines) == "[serve] ends after 1 open groups\n"
        assert httpx.get(f"{running.url}/health").json()["status"] == "draining"
        for path, body, status, part in (
            ("groups", QUERY | {"texts": TEXTS}, 503, "the server is about to end"),
            ("rewind", {"step": 0}, 409, "1 groups are being scored"),
        ):
            refused = httpx.post(f"{running.url}/v1/{path}", json=body)
            assert refused.status_code == status and part in refused.json()["error"]
        os.write(open_gate, b"." * 1000)
        answer = post.result()
    assert answer.status_code == 200 and wait([running.pid]) == [0]
    (recorded,) = contents(tmp_path / "out")["groups"]
    assert json.loads(recorded[6]) == answer.json()["rewards"]
    os.read(asked, 1000), os.read(gate, 1000)  # what is left in the pipes
    running = process("--output_dir", tmp_path / "again", before=close_the_gate)
    with ThreadPoolExecutor(1) as pool:
        post = pool.submit(httpx.post, f"{running.url}/v1/groups", json=QUERY | {"texts": TEXTS}, timeout=60)
        os.read(asked, 1)
        os.kill(running.pid, signal.SIGTERM)
        assert next(running.lines) == "[serve] ends after 1 open groups\n"
        os.kill(running.pid, signal.SIGTERM)
        assert wait([running.pid]) == [-signal.SIGTERM], "the second one ends it at once"
        with pytest.raises(httpx.TransportError):
            post.result()
