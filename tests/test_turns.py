"""What is in flight at a server follows what the server answers in time."""

import asyncio

import anyio
import pytest
from conftest import ask_all
from helpers.servers import GOOD, PATIENT, completion, hang, status
from hypothesis import example, given
from hypothesis import strategies as st

from rankbuffer_trl.judge import Judge, Question, insertion_question
from rankbuffer_trl.judge._servers import Servers
from rankbuffer_trl.judge._turns import MOST_ROUNDS, Turns


@pytest.mark.parametrize("late", [pytest.param("hangs", marks=pytest.mark.slow), "504"])
def test_a_server_that_takes_four_at_once_answers_all_and_the_log_says_so(fault, query, monkeypatch, caplog, late):
    """Beyond that it answers none in time. Each fault gives its slot back."""
    flying, crowds, sleep = [], [], anyio.sleep
    monkeypatch.setattr(anyio, "sleep", lambda seconds: sleep(0))  # the backoff

    async def answer(request, n):
        flying.append(n)
        crowds.append(len(flying))
        try:
            await asyncio.sleep(0.02)
            if len(flying) > 4:
                return await hang(request, n) if late == "hangs" else status(504)(request, n)
            return completion(GOOD)
        finally:
            flying.remove(n)

    client = fault.client(answer, 4, timeout=0.5 if late == "hangs" else PATIENT, concurrency=32)
    judge = Judge(Servers([client], probe_every=0, wait=PATIENT))
    questions = [insertion_question(query, ["bad", "good"], str(i)) for i in range(100)]
    assert ask_all(judge, questions) == [1] * 100
    turns = client.turns
    assert crowds[0] == 1 and max(crowds) > 16 > max(crowds[-20:]) and turns.cuts > 1
    assert turns._slots._value - turns._debt == turns.now, "each slot is given back once"
    assert caplog.text.count("does not answer 32 requests at once in time: at most 16 are in flight now") == 1
    assert caplog.text.count("in flight now") == 1, "one line a minute"


def rounds(turns: Turns, number: int = 1, late: float = 0.0) -> list[int]:
    """Let rounds of answers end, of which a share is late. Return what may be in flight after each."""
    found = []
    for _ in range(number):
        cuts, now = turns.cuts, turns.now
        for i in range(now):
            turns.ended(cuts, i < late * now)
        found.append(turns.now)
    return found


def test_turns_grow_at_once_up_to_what_was_too_much_and_wait_longer_each_time_to_pass_it():
    turns = Turns(32)
    assert rounds(turns, late=0.25) == [32], "a few slow answers are no cause"
    assert rounds(turns, 2, late=1) == [16, 8], "half of it, once a round"
    assert rounds(turns, 3) == [10, 12, 14]
    for needed in (1, 2, 4, 8, MOST_ROUNDS):
        assert rounds(turns, needed) == [14] * (needed - 1) + [16]
        assert rounds(turns, late=1) == [8] and rounds(turns, 3) == [10, 12, 14]
    assert rounds(turns, MOST_ROUNDS)[-1] == 16 and rounds(turns, 9) == [18, 20, 22, 24, 26, 28, 30, 32, 32]
    assert rounds(turns, late=1) == [16], "what was too much before is forgotten"
    assert rounds(turns, 5, late=1) == [8, 4, 2, 1, 1]
    turns.ended(0, True)
    assert rounds(turns, 3) == [1, 3, 5], "a request from before the cuts does not count"


@example(2, ["take", "take", "late", "again", "leave"])
@example(4, ["take"] * 4 + ["late", "late", "in time", "in time"])
@given(st.integers(1, 9), st.lists(st.sampled_from(["take", "give", "again", "leave", "late", "in time"])))
def test_turns_lose_no_slot_and_make_none(most, events):
    async def run():
        turns, held, waiting = Turns(most), 0, []
        for event in events:
            if event == "take" and not turns._slots.locked():
                await turns.__aenter__()
                held += 1
            elif event == "give" and held:
                await turns.__aexit__()
                held -= 1
            elif event == "again" and held:  # which waits while too many are in flight
                task = asyncio.create_task(turns.again())
                await asyncio.sleep(0)
                if not task.done():
                    held -= 1
                    waiting.append(task)
            elif event == "leave" and waiting:
                (task := waiting.pop()).cancel()
                await asyncio.sleep(0)
                if task.cancelled():
                    await turns.__aexit__()
            elif event in ("late", "in time"):
                turns.ended(turns.cuts, event == "late")
            await asyncio.sleep(0)
            held += len(done := [task for task in waiting if task.done()])
            waiting = [task for task in waiting if task not in done]
            assert turns._slots._value + held - turns._debt == turns.now and 1 <= turns.now <= most

    asyncio.run(run())


def test_the_prompt_of_a_question_that_waits_for_its_turn_is_not_written(fault, query):
    """All pairs of a large group hold hundreds of megabytes otherwise."""
    written, answered = [], []

    class Counted(Question):
        def chat(self, guard=False):
            written.append(len(answered))
            return super().chat(guard)

    async def answer(request, n):
        await asyncio.sleep(0)
        answered.append(n)
        return completion("no verdict" if n == 1 else GOOD)

    questions = [Counted(**vars(insertion_question(query, ["bad", "good"], str(i)))) for i in range(12)]
    assert ask_all(Judge(Servers([fault.client(answer, 0, concurrency=2)])), questions) == [1] * 12
    assert len(written) == 12, "once, also if it is asked again"
    assert all(i < 2 + before for i, before in enumerate(written)), "two are in flight"
