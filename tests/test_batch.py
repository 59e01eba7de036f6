"""Many chats and questions put to a judge at once: checked first, kept over kills, added up."""

import asyncio
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from aiohttp import web
from conftest import ask, numbers, scripted_judge, unreachable
from helpers.damage import BAD, MISSING, changed, damaged
from helpers.judges import Fake
from helpers.servers import Fault, completion, counting, serving
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_tools.batch.ask import (
    PILOT,
    AnswerLog,
    AnswerLogError,
    Answers,
    ask_many,
    digest,
    hash_request,
    pilot_of,
    progress,
)
from rankbuffer_tools.batch.chat import Chat
from rankbuffer_tools.batch.script import run_script
from rankbuffer_tools.batch.server_check import check_judge, longest_need, servers_of
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import (
    Judge,
    JudgeError,
    Reading,
    Totals,
    Usage,
    VerdictError,
    insertion_question,
    pointwise_question,
)
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.testing import QUERY


def read_number(answer: str, cut_off: bool) -> int:
    if not answer.isdigit():
        raise VerdictError("not a number")
    return int(answer)


def chat(text: str, **kwargs) -> Chat:
    messages = [{"role": "system", "content": "Add one."}, {"role": "user", "content": text}]
    return Chat("sum", "q", messages, read_number, **kwargs)


def add_one(messages: list[dict]) -> str:
    return str(int(messages[1]["content"]) + 1)


def put(judge: Judge, log: Path | None, *numbers: int, **kwargs) -> Answers:
    return asyncio.run(ask_many(judge, {f"k{n}": chat(str(n)) for n in numbers}, log, "adding", **kwargs))


@pytest.mark.parametrize("afresh", [False, True])
def test_judge_asks_a_chat_again_in_a_turn_or_afresh(afresh):
    answers = ["x", "2"]
    judge = scripted_judge(lambda messages: answers[len(judge.client.seen) - 1])
    value, call = ask(judge, chat("1", afresh=afresh))
    assert (value, call.outcome, call.attempts, call.usage) == (2, "parsed", 2, Usage(10, 4, 3))
    assert call.malformed == 1
    first, second = judge.client.seen
    assert first == second[:2] and len(second) == (2 if afresh else 4)
    assert afresh or "not a number" in second[-1]["content"]


def test_judge_sends_the_fields_of_a_chat_and_a_seed_for_each_repeat(fault):
    def fields(handler, user: dict, request: dict) -> list[dict]:
        ask(Judge(fault.client(handler, 0, request=user)), chat("6", request=request, afresh=True))
        return [{key: body[key] for key in body if key not in ("messages", "model")} for body in fault.seen]

    sampled = {"temperature": 0.7, "seed": 5, "top_k": -1}
    asked = fields(lambda request, n: completion("x" if n == 1 else "7"), {}, sampled)
    assert asked == [sampled, sampled | {"seed": 6}]
    plain = fields(lambda request, n: completion("7"), {"top_k": None}, {"seed": None, "max_tokens": 9, "top_k": 3})
    assert plain == [{"temperature": 0, "max_tokens": 9}]


# The log


ENDS = {  # how the judge answers: (the answer, the outcome, what is said of it, prompt tokens)
    "good": (add_one, "parsed", "", 10),
    "bad": (lambda messages: "?", "malformed", "malformed: not a number", 20),
    "gone": (unreachable, "unreachable", "unreachable: connection refused", 0),
}
# Of more questions, some go first, and the others are not asked if none of those can be read.
JOBS = st.lists(st.dictionaries(st.integers(0, 6), st.sampled_from(["good", *ENDS]), max_size=4), max_size=5)


@given(JOBS)
@example([{1: "good"}, {5: "bad", 4: "good", 3: "gone", 1: "bad"}, {3: "good", 5: "good"}, {4: "bad"}])
def test_jobs_over_one_log_ask_what_has_no_answer_yet_and_add_up_what_was_paid_for(jobs):
    known: list[int] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "log.jsonl"
        for job in jobs:

            def answer(messages, job=job):
                return ENDS[job[int(messages[1]["content"])]][0](messages)

            judge = scripted_judge(answer, max_attempts=2)
            judge.client.close = AsyncMock()
            answers, todo = put(judge, path, *job), [n for n in job if n not in known]
            known += [n for n in todo if job[n] == "good"]
            failed = {n: ENDS[job[n]] for n in todo if job[n] != "good"}
            seen = Counter(int(messages[1]["content"]) for messages in judge.client.seen)
            assert seen == {n: 1 + (job[n] == "bad") for n in todo}
            assert judge.drain() == [] and judge.client.close.await_count == 1
            assert answers.values == {f"k{n}": n + 1 for n in job if n in known}
            assert list(answers.failures.items()) == [(f"k{n}", said) for n, (_, _, said, _) in failed.items()]
            outcomes = {f"k{n}": failed[n][1] if n in failed else "parsed" for n in job}
            assert {name: call.outcome for name, call in answers.asked.items()} == outcomes
            spent = 10 * len(known) + sum(tokens for *_, tokens in failed.values())
            totals = answers.totals
            assert (totals.calls, totals.failures) == (len(known), len(failed)), "the log holds other questions, too"
            assert totals.spent_prompt_tokens == spent, "failures are charged to the run in which they happen"
            with AnswerLog(path) as log:
                assert len(log.calls) == Totals.of(log.calls).calls == len(known)


def test_progress_shows_the_rate_of_a_slow_judge():
    column = progress().columns[3]
    assert column.render(SimpleNamespace(finished_speed=None, speed=0.05)) == "3 a minute"
    assert column.render(SimpleNamespace(finished_speed=None, speed=None)) == ""


def test_ask_many_writes_nothing_without_a_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = put(scripted_judge(add_one), None, 1, 2)
    assert answers.values == {"k1": 2, "k2": 3} and len(answers.calls) == 2 and not list(tmp_path.iterdir())


def test_ask_many_reuses_an_answer_for_the_same_words_model_and_fields_only(tmp_path):
    def asked(text="1", model=None, guard=False, **request) -> int:
        judge = scripted_judge(lambda messages: "7", guard=guard)
        questions = {"k": chat(text, request=request)}
        asyncio.run(ask_many(judge, questions, tmp_path / "log", "adding", model))
        return len(judge.client.seen)

    assert [asked(), asked(), asked("2"), asked(model="other"), asked()] == [1, 0, 1, 1, 0]
    words = [{"role": "user", "content": "1"}]
    assert hash_request("m", words, {"a": 1, "b": 2}) == hash_request("m", words, {"b": 2, "a": 1})
    others = [("n", words, {"a": 1}), ("m", [*words, *words], {"a": 1}), ("m", words, {"a": 2}), ("m", words, {})]
    assert len({hash_request("m", words, {"a": 1}), *(hash_request(*other) for other in others)}) == 5
    assert hash_request("m", words, {"a": 1}) == "b940b2395acbbc75", "a log of an earlier version counts"


def test_ask_many_takes_decoding_guard_and_the_users_fields_for_parts_of_a_question(fault, tmp_path):
    """A question of a reward method is another request under another decoding, guard or `judge_request`."""
    fault.play(counting(None, '{"position": 1}'))
    question = insertion_question(numbers("q"), ["1", "2"], "3")

    def asked(**settings) -> int:
        before = fault.asked
        answers = asyncio.run(ask_many(judge_at(fault, **settings), {"k": question}, tmp_path / "log", "asking"))
        assert answers.values == {"k": 1}
        return fault.asked - before

    changes = [{"judge_decoding": "regex"}, {"judge_guard": False}, {"judge_free_tokens": 9}]
    changes.append({"judge_request": {"top_p": 0.5}})
    assert [asked(), asked()] == [1, 0]
    assert [asked(**change) for change in changes] == [1] * 4 and asked(**changes[3]) == 0


def ask_until_killed(path: Path) -> None:
    """Die with 20 answers in the log and 20 questions in flight, which are never answered."""

    async def die(asked):
        asked_for.append(asked)
        if len(asked_for) > 20:
            while path.read_bytes().count(b"\n") < 20:
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGKILL)

    asked_for: list = []
    put(Judge(Fake(add_one, before=die)), path, *range(40))


def test_a_job_that_is_killed_and_started_again_asks_nothing_twice_and_counts_what_was_paid_for(tmp_path, caplog):
    """All programs with a log of answers go through this door."""
    path = tmp_path / "log"
    writer = multiprocessing.get_context("fork").Process(target=ask_until_killed, args=(path,))
    writer.start()
    writer.join(60)
    assert writer.exitcode == -signal.SIGKILL
    path.write_bytes(path.read_bytes()[:-7])  # as a kill in the middle of a line leaves it
    with AnswerLog(path) as log:
        assert len(log.calls) == 19 and "incomplete" in caplog.text
    answers = put(judge := scripted_judge(add_one), path, *range(40))
    assert len(judge.client.seen) == 21 and answers.totals.calls == 40
    assert answers.values == {f"k{n}": n + 1 for n in range(40)}
    assert put(judge, path, *range(40)).values == answers.values and len(judge.client.seen) == 21


def test_ask_many_has_an_answer_in_the_log_before_the_next_request_leaves(fault, tmp_path):
    path, waiting = tmp_path / "log", []

    def complete(request, n):
        asked = fault.seen[n - 1]
        if not asked:
            return completion("no list of models")
        waiting.append(fault.asked - len(path.read_bytes().splitlines()))
        return completion(add_one(asked["messages"]))

    put(Judge(fault.client(complete, 0, concurrency=2)), path, *range(60))
    assert len(waiting) == 60 and max(waiting) <= 2, "a kill loses no more than the requests in flight"


def test_answer_log_names_a_damaged_line_and_leaves_the_file_free(tmp_path):
    put(scripted_judge(add_one), tmp_path / "log", 1, 2)
    text = (tmp_path / "log").read_text()
    first, second = text.splitlines(keepends=True)
    row = json.loads(first)
    places = [(key,) for key in row] + [("call", key) for key in row["call"]] + [("call", "usage", 1)]
    wrong = ["\n", "[" * 100_000 + "\n", first[:-9] + "\n", first.replace('"value": 2', '"value": 99')]
    wrong += [json.dumps(changed(row, place, bad)) + "\n" for place in places for bad in BAD]
    old = json.dumps(changed(row, ("digest",), MISSING)) + "\n"  # as earlier versions wrote
    for line in set(wrong) - {old}:
        for content, number in ((line + second, 1), (second + line, 2)):
            (tmp_path / "log").write_text(content)
            with pytest.raises(AnswerLogError, match=rf"log, line {number}, is not an answer \(.*\): delete") as error:
                AnswerLog(tmp_path / "log")
                pytest.fail(content)
            assert isinstance(error.value, RankBufferError) and isinstance(error.value, ValueError)
            assert "\n" not in str(error.value) and (tmp_path / "log").read_text() == content, "it is left as it is"


def test_answer_log_keeps_readings_typed_and_names_damage_to_them(tmp_path):
    log, reading = tmp_path / "log", Reading(8, {8: 0.75, 9: 0.25}, 0.125, 0.0)
    _, call = asyncio.run(scripted_judge(add_one).ask_with_cost(chat("1")))
    with AnswerLog(log) as answers:
        answers.add("k", reading, call)
    text = log.read_text()
    for what, line in damaged(text, lambda place: "value" in place):
        log.write_text(line + "\n")
        with pytest.raises(AnswerLogError, match=r"line 1, is not an answer \(.*\): delete"):
            AnswerLog(log)
            pytest.fail(what)
    row = json.loads(text)
    del row["digest"]
    for bad in ("nothing", "{}", "[[0]]"):
        log.write_text(json.dumps(changed(row, ("value", "chances"), {bad: 1.0})) + "\n")
        with pytest.raises(AnswerLogError):
            AnswerLog(log)
    log.write_text(text)
    with AnswerLog(log) as answers:
        assert answers["k"] == reading and isinstance(answers["k"], Reading)


def test_ask_many_takes_no_word_alone_for_a_soft_question(tmp_path):
    judge, word = scripted_judge(lambda _: '{"score": 3}'), pointwise_question(QUERY, "3.a")
    for question, kind in ((word, int), (replace(word, soft=True), Reading)) * 2:
        answers = asyncio.run(ask_many(judge, {"k": question}, tmp_path / "log", "rating"))
        assert type(answers.values["k"]) is kind
    assert len(judge.client.seen) == 2


def test_answer_log_reads_a_line_of_an_older_version(tmp_path):
    put(scripted_judge(add_one), tmp_path / "log", 1)
    row = json.loads((tmp_path / "log").read_text())
    del row["call"]["malformed"], row["digest"]
    assert digest({"key": "k", "value": {"b": 1, "a": 2}, "call": None}) == "e4133c9bf9a982d7", "so it was written"
    (tmp_path / "log").write_text(json.dumps(row) + "\n")
    with AnswerLog(tmp_path / "log") as log:
        assert [call.malformed for call in log.calls] == [0] and Totals.of(log.calls).calls == 1


def test_answer_log_belongs_to_one_job(tmp_path):
    with AnswerLog(tmp_path / "log"), pytest.raises(BlockingIOError, match="in use by another process"):
        AnswerLog(tmp_path / "log")
    AnswerLog(tmp_path / "log").close()


def test_answer_log_keeps_whole_lines_on_a_full_disk(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        put(scripted_judge(add_one), tmp_path / "log", 1)
        size = (tmp_path / "log").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            put(scripted_judge(add_one), tmp_path / "log", 2, 3, 4)
        assert (tmp_path / "log").stat().st_size == size
        with AnswerLog(tmp_path / "log") as log:
            assert len(log.calls) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_price_adds_up_what_answers_cost(tmp_path):
    totals = put(scripted_judge(add_one), tmp_path / "log", *range(4)).totals
    assert JudgeConfig().endpoint.price(totals) is None
    assert JudgeConfig(judge_prompt_price=100.0).endpoint.price(totals) == pytest.approx(4 * 10 * 100 / 1e6)
    both = JudgeConfig(judge_prompt_price=1.0, judge_completion_price=2.0).endpoint
    assert both.price(totals) == pytest.approx(4 * (10 + 2 * 3) / 1e6)
    with pytest.raises(ValueError, match="judge_completion_price must be at least 0"):
        JudgeConfig(judge_completion_price=-1.0)


def test_ask_many_leaves_the_rest_if_none_of_the_first_can_be_read_or_too_many_fail():
    def unread(messages):
        return "nothing" if int(messages[1]["content"]) % 10 in bad else add_one(messages)

    bad, client = {0, 1, 2, 3}, Fake(unread)
    found = put(Judge(client, max_attempts=1), None, *range(40))
    assert len(found.asked) == PILOT and len(found.failures) == 40 and not found.values
    assert "none of the first 4 could be read" in found.failures["k39"]
    assert len(put(Judge(client, max_attempts=1), None, *range(PILOT)).failures) == PILOT, "nothing else to ask"
    bad = {1, 2}
    found = put(Judge(Fake(unread), max_attempts=1), None, *range(100), max_failures=0.05)
    failed = [name for name in found.failures if name in found.asked]
    assert 5 < len(failed) < 20 and len(found.failures) == 100 - len(found.values)
    kinds = {f"{kind} {i}": replace(chat("1"), kind=kind) for kind in "abcde" for i in range(3)}
    assert pilot_of(kinds) == ["a 0", "b 0", "c 0", "d 0"] and pilot_of({"a 0": chat("1")}) == ["a 0"]


def test_ask_many_ends_with_a_bug_as_itself_and_keeps_what_was_answered(tmp_path):
    def answer(messages):
        return ZeroDivisionError("a bug") if messages[1]["content"] == "3" else add_one(messages)

    judge = scripted_judge(answer)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        put(judge, tmp_path / "log", 1, 2, 3)
    assert judge.drain() == []
    assert put(scripted_judge(add_one), tmp_path / "log", 1, 2, 3).values == {"k1": 2, "k2": 3, "k3": 4}


# The check


def judge_at(*servers: Fault, **settings) -> Judge:
    urls = [server.url for server in servers]
    return JudgeConfig(judge_url=urls, judge_model="m", judge_max_retries=0, **settings).judge()


def words(n: int, **kwargs) -> Chat:
    """A chat of `n` words: two of the system, the others short ones of the user."""
    return chat(" ".join(["x"] * (n - 2)), **kwargs)


@pytest.mark.parametrize(
    ("context", "request_fields", "settings", "fits"),
    [
        (30, {"max_tokens": 10}, {}, True),  # exactly
        (29, {"max_tokens": 10}, {}, False),
        (29, {"max_tokens": 10}, {"judge_request": {"max_tokens": 9}}, True),  # the user's fields win
        (20, {}, {}, True),
        (19, {}, {}, False),
        (None, {"max_tokens": 10}, {}, True),  # a server that does not say
    ],
)
def test_ask_many_checks_that_the_longest_prompt_and_its_answer_fit(fault, context, request_fields, settings, fits):
    fault.play(counting(context))
    questions = {f"k{n}": words(n, request=request_fields) for n in (3, 20, 9)}
    job = ask_many(judge_at(fault, **settings), questions, None, "asking")
    if fits:
        assert asyncio.run(job).values == dict.fromkeys(questions, 7)
        return
    needed = 20 + request_fields.get("max_tokens", 0)
    with pytest.raises(JudgeError, match=rf"a context of {context} tokens is too small.*max-model-len {needed} "):
        asyncio.run(job)
    assert fault.asked == 0


def test_longest_need_has_the_room_of_a_verdict(fault):
    async def need_of(judge, question):
        try:
            return await longest_need(servers_of(judge)[0], [question], judge.guard)
        finally:
            await judge.client.close()

    question = insertion_question(numbers("q"), ["1", "2"], "3")
    fault.play(counting(1000))
    for decoding, room in (("none", 16 + 256), ("regex", 16)):
        for guard in (True, False):
            need = asyncio.run(need_of(judge_at(fault, judge_decoding=decoding, judge_guard=guard), question))
            assert need.exact and (need.answer, need.prompt) == (room, len(question.prompt(guard).split()))
            assert fault.seen[-1]["messages"] == question.chat(guard)


def test_ask_many_counts_tokens_of_several_prompts_where_the_server_can(fault):
    """The longest text need not have the most tokens."""
    prompts = {"long word": chat("x" * 500), "many words": words(30)}
    fault.play(counting(20))
    with pytest.raises(JudgeError, match="has 30 tokens"):
        asyncio.run(ask_many(judge_at(fault), prompts, None, "asking"))
    fault.play(counting(20, tokenizes=False))
    assert asyncio.run(ask_many(judge_at(fault), prompts, None, "asking")).values == dict.fromkeys(prompts, 7)


def test_judge_package_loads_no_client_before_it_is_needed():
    heavy = "[name for name in ('openai', 'rich', 'torch', 'datasets') if name in sys.modules]"
    code = f"import sys, rankbuffer_trl.judge; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("listed", "model", "chat", "said"),
    [
        (["x", "y"], "x:nitro", 200, "takes judge_model='x:nitro', .* list of 2 (the nearest are 'x', 'y')"),
        (["qwen3:latest"], "qwen3", 200, "not in its list of 1 (the nearest are 'qwen3:latest')"),
        (["openai/*"], "openai/gpt-5", 400, "not in its list of 1 (the nearest are 'openai/*')"),  # no max_tokens
        ([], "deployed", 200, "not in its list of 0 (it is empty)"),
        ([f"name-{i}" + "x" * 200 for i in range(400)], "name", 200, "not in its list of 400 (the nearest are "),
        (404, "m", 200, "lists no models (HTTP 404: "),
        (500, "m", 200, "lists no models (HTTP 500: "),
        ("text", "m", 200, "lists no models (not a list of models"),
        (["m"], "m", 404, None),
        (["judge"], "jugde", 404, SettingsError),
    ],
)
def test_check_judge_leaves_a_model_that_is_not_listed_to_the_first_question(listed, model, chat, said, caplog):
    def handle(request, n):
        if request.path.endswith("/chat/completions"):
            return completion("7") if chat == 200 else web.json_response({"error": {"message": "no"}}, status=chat)
        if isinstance(listed, list):
            return web.json_response({"object": "list", "data": [{"id": name} for name in listed]})
        return web.json_response({}, status=listed) if isinstance(listed, int) else web.Response(text=listed)

    with serving() as server:
        judge = JudgeConfig(judge_url=server.play(handle).url, judge_model=model, judge_max_retries=0).judge()
        if said is SettingsError:
            with pytest.raises(SettingsError, match=r"does not serve judge_model='jugde', .* nearest are 'judge'\)$"):
                check_judge(judge)
            return
        check_judge(judge)
    lines = [record.getMessage() for record in caplog.records if "judge server" in record.getMessage()]
    assert len(lines) == (said is not None) and all(len(line) < 600 for line in lines)
    assert not said or re.search(re.escape(said).replace(r"\.\*", ".*"), lines[0])


def test_check_judge_names_what_is_wrong_and_passes_the_embedded_one():
    with serving() as server:
        server.play(counting(10))
        check_judge(judge_at(server))
    with pytest.raises(JudgeError, match="cannot be reached"):
        check_judge(judge_at(server))
    check_judge(JudgeConfig().judge())


def test_ask_many_needs_no_server_where_all_is_answered(tmp_path):
    with serving() as server:
        server.play(counting(100))
        asyncio.run(ask_many(judge_at(server), {"k": words(5)}, tmp_path / "log", "asking"))
    again = asyncio.run(ask_many(judge_at(server), {"k": words(5)}, tmp_path / "log", "asking"))
    assert again.values == {"k": 7} and server.asked == 1


def test_run_script_prints_an_answer_in_a_locale_that_has_not_its_letters(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["sample", "--judge_url", "http://127.0.0.1:1/v1", "--judge_model", "j"])
    with pytest.raises(SystemExit) as end:
        run_script(JudgeConfig, lambda config: print("Thé") or 0)
    sys.stdout.flush()
    assert (end.value.code, written.getvalue()) == (0, b"Th\\xe9\n")
