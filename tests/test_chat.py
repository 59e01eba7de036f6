"""Chats through the judge's seam, and the log that keeps their answers over kills."""

import asyncio
import json
import multiprocessing
import os
import resource
import signal

import pytest
from aiohttp import web
from conftest import ask, scripted_judge, unreachable
from http_server import served

from rankbuffer_trl.judge import AnswerLog, Chat, Judge, Usage, VerdictError, answer_all
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.openai_client import OpenAIClient


def read_number(answer: str) -> int:
    if not answer.isdigit():
        raise VerdictError("not a number")
    return int(answer)


def chat(text: str, **kwargs) -> Chat:
    messages = [{"role": "system", "content": "Add one."}, {"role": "user", "content": text}]
    return Chat("sum", "q", messages, read_number, **kwargs)


def add_one(messages: list[dict]) -> str:
    return str(int(messages[1]["content"]) + 1)


def chats(*numbers: int) -> list[tuple[str, Chat]]:
    return [(f"k{n}", chat(str(n))) for n in numbers]


def answer(judge: Judge, log: AnswerLog, *numbers: int, **kwargs) -> dict[str, str]:
    return asyncio.run(answer_all(judge, chats(*numbers), log, **kwargs))


@pytest.mark.parametrize("afresh", [False, True])
def test_a_malformed_answer_is_asked_again_in_a_turn_or_afresh(afresh):
    answers = ["x", "2"]
    judge = scripted_judge(lambda messages: answers[len(judge.client.seen) - 1])
    value, call = ask(judge, chat("1", afresh=afresh))
    assert (value, call.outcome, call.attempts, call.usage) == (2, "parsed", 2, Usage(10, 4, 3))
    first, second = judge.client.seen
    assert first == second[:2] and len(second) == (2 if afresh else 4)
    if not afresh:
        assert "not a number" in second[-1]["content"]


def test_fields_of_the_request_go_to_the_server_and_each_repeat_has_its_seed():
    bodies = []

    async def complete(request):
        bodies.append(await request.json())
        return web.json_response({"choices": [{"message": {"content": "x" if len(bodies) == 1 else "7"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    with served(app) as address:
        for request in ({"temperature": 0.7, "seed": 5, "top_k": -1}, {"seed": None, "max_tokens": 9}):
            judge = Judge(OpenAIClient(f"{address}/v1", "m", request={"top_k": None} if bodies else {}))
            ask(judge, chat("6", request=request, afresh=True))
    sampled, again, plain = ({k: v for k, v in body.items() if k not in ("messages", "model")} for body in bodies)
    assert sampled == {"temperature": 0.7, "seed": 5, "top_k": -1}
    assert again == sampled | {"seed": 6}
    assert plain == {"temperature": 0, "max_tokens": 9}


def test_what_is_in_the_log_is_not_asked_again(tmp_path):
    judge, done = scripted_judge(add_one), []
    with AnswerLog(tmp_path / "new" / "log.jsonl") as log:
        assert answer(judge, log, 1, 2, on_done=lambda *each: done.append(each[:2])) == {}
    assert sorted(done) == [("k1", 2), ("k2", 3)] and judge.drain() == []
    with AnswerLog(tmp_path / "new" / "log.jsonl") as log:
        assert len(log) == 2 and "k1" in log and log["k2"] == 3
        assert answer(judge, log, 1, 2, 3) == {}
        assert len(judge.client.seen) == 3 and log["k3"] == 4
        assert (log.totals().calls, log.totals().prompt_tokens) == (3, 30)


def test_failures_are_named_and_asked_again_next_time(tmp_path):
    with AnswerLog(tmp_path / "log") as log:
        failed = answer(scripted_judge(unreachable), log, 1)
        assert failed == {"k1": "unreachable: connection refused"} and "k1" not in log
        assert answer(scripted_judge(lambda messages: "?", max_attempts=2), log, 1) == {
            "k1": "malformed: not a number"
        }
        assert answer(scripted_judge(add_one), log, 1) == {} and log["k1"] == 2


def write_until_killed(path) -> None:
    with AnswerLog(path) as log:
        for n in range(10_000):
            judge = scripted_judge(add_one)
            asyncio.run(answer_all(judge, chats(n), log))
            if n == 20:
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_loses_nothing_and_a_torn_line_is_dropped(tmp_path, caplog):
    writer = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path / "log",))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    whole = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(whole[:-7])
    with AnswerLog(tmp_path / "log") as log:
        assert len(log) == 20 and "torn" in caplog.text
        judge = scripted_judge(add_one)
        answer(judge, log, *range(21))
        assert len(judge.client.seen) == 1
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(row["value"] for row in rows) == list(range(1, 22))


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
    with AnswerLog(tmp_path / "log") as log:
        answer(scripted_judge(add_one), log, 1, 2)
    text = (tmp_path / "log").read_text()
    (tmp_path / "log").write_text("{}\n" + text)
    with pytest.raises(ValueError, match=r"log, line 1, is not an answer"):
        AnswerLog(tmp_path / "log")


def test_two_jobs_cannot_have_one_log(tmp_path):
    with AnswerLog(tmp_path / "log"), pytest.raises(BlockingIOError, match="in use by another process"):
        AnswerLog(tmp_path / "log")
    AnswerLog(tmp_path / "log").close()


def test_a_full_disk_ends_the_job_and_keeps_whole_lines(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with AnswerLog(tmp_path / "log") as log:
            answer(scripted_judge(add_one), log, 1)
            size = (tmp_path / "log").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
            with pytest.raises(OSError, match="File too large"):
                answer(scripted_judge(add_one), log, 2)
            assert "k2" not in log
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    with AnswerLog(tmp_path / "log") as log:
        assert len(log) == 1 and (tmp_path / "log").stat().st_size == size


def test_what_answers_cost(tmp_path):
    with AnswerLog(tmp_path / "log") as log:
        answer(scripted_judge(add_one), log, *range(4))
        assert JudgeConfig().price(log.totals()) is None
        assert JudgeConfig(judge_prompt_price=100.0).price(log.totals()) == pytest.approx(4 * 10 * 100 / 1e6)
        both = JudgeConfig(judge_prompt_price=1.0, judge_completion_price=2.0)
        assert both.price(log.totals()) == pytest.approx(4 * (10 + 2 * 3) / 1e6)
    with pytest.raises(ValueError, match="judge_completion_price must be at least 0"):
        JudgeConfig(judge_completion_price=-1.0)
