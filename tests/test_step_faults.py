"""What a judge that misbehaves does to a whole step. Real sockets, a real store."""

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from aiohttp import web
from conftest import by_number, group, numbers, scripted_judge, unreachable
from helpers.contents import contents
from helpers.judges import Fake
from helpers.servers import EVENT_LIMIT, PATIENT, SURROGATE, completion, hang, judged_by, refusing
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbuffer_trl._step import Step
from rankbuffer_trl.checkpointing._distributed import StepLeft
from rankbuffer_trl.judge import Judge, JudgeError, TransportError, Usage
from rankbuffer_trl.judge._ledger import MOST_TOKENS
from rankbuffer_trl.judge._openai_client import OpenAIClient
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.training._scorer import GroupScorer


def number(prompt: str) -> web.Response:
    return completion(by_number([{"content": prompt}]))


def ledger(scorer: GroupScorer) -> Counter:
    return Counter(outcome for (outcome,) in scorer.store.rows("SELECT outcome FROM calls"))


def nothing_else(scorer: GroupScorer) -> bool:
    return not any(contents(scorer.store, ("responses", "buffers", "groups")).values())


def test_a_step_that_cannot_succeed_ends_before_all_is_asked(scorer):
    requests = []

    def refuse(prompt):
        requests.append(prompt)
        return refusing(404, "no such model")(None, 0)

    with judged_by(refuse) as url:
        made = scorer(Judge(OpenAIClient(url, "m", concurrency=4), guard=False))
        groups = [group(numbers(f"q{i}"), "1 2 3 4 5 6 7 8", 3) for i in range(8)]
        with pytest.raises(JudgeError) as error:
            made.score(groups, 3)
        # 64 insertions and at most 32 fine rankings: 24 failures are allowed
        parts = [f"m at {url}", "failed 25 of 25", "(25 unreachable)", "judge_max_failures=0.25", "no such model"]
        assert [part for part in parts if part not in str(error.value)] == [] and not error.value.passing
        found = ledger(made)
        sent = sum(found.values())
        assert set(found) <= {"unreachable", "cancelled"}
        assert found["unreachable"] >= 25
        assert found["unreachable"] <= len(requests) <= sent < 64, "a question that was not sent left a call"
        assert list(made.store.rows("SELECT min(attempts), max(attempts) FROM calls")) == [(1, 1)]
        assert nothing_else(made)


def failing(insertions: frozenset[str], rankings: frozenset[str]) -> Callable:
    """The number judge, which fails these candidates, and the rankings that hold one of those."""

    def respond(messages):
        _, is_ranking, block = messages[0]["content"].partition("\n\nCANDIDATES\n")
        if is_ranking:
            return "Hm." if rankings & set(block.split()) else by_number(messages)
        candidate = messages[0]["content"].rpartition("\n\nCANDIDATE\n")[2].partition("\n")[0]
        return unreachable(messages) if candidate in insertions else by_number(messages)

    return respond


@pytest.fixture(scope="module")
def tester(tmp_path_factory) -> Iterator[GroupScorer]:
    """Evaluates alone, so that every step is the first."""
    store = BufferStore(tmp_path_factory.mktemp("tester") / "store.sqlite")
    store.rows("PRAGMA synchronous = OFF")  # hundreds of steps, and none has to outlast a power cut
    made = GroupScorer(RankBuffer(), scripted_judge(by_number, max_attempts=1), store)
    yield made
    made.close()


TEXTS = st.sampled_from("5 15 16 17 25 26 45 46 47 48 -".split())


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(TEXTS, min_size=1, max_size=8).map(" ".join), min_size=1, max_size=4),
    insertions=st.frozensets(TEXTS),
    rankings=st.frozensets(TEXTS),
    share=st.integers(0, 32).map(lambda n: n / 32),
    method=st.sampled_from([RankBuffer(), RankBuffer(fine=False), RankBuffer(bootstrap=True)]),
)
def test_an_early_end_is_never_a_wrong_end(tester, texts, insertions, rankings, share, method):
    tester.method = method
    tester.judge.client.answer = failing(insertions, rankings)
    groups = [group(numbers(f"q{i}"), line, 0) for i, line in enumerate(texts)]
    tester.max_failures = 1.0
    calls = tester.score(groups, 0, update=False).calls
    failed = sum(call.failed for call in calls)
    for allowed in (share, failed / max(len(calls), 1)):
        tester.max_failures = allowed
        try:
            tester.score(groups, 0, update=False)
        except JudgeError:
            stopped = True
        else:
            stopped = False
        assert stopped == (failed / max(len(calls), 1) > allowed)


def test_an_early_end_waits_for_the_answers_about_texts_that_came_instead(scorer):
    """Two of eight questions fail: one about the texts that arrived, and the first about those that came instead."""
    made = scorer(scripted_judge(failing(frozenset("15"), frozenset())), RankBuffer(fine=False), max_failures=0.3)
    made.begin([group(numbers(), "? ? ? ?", 0)], 0)
    for row, text in enumerate("1234"):
        made.arrived(row, text)
    while len(made._begun.judge.calls) < 4:
        made.run(asyncio.sleep(0))
    outcome = made.score([group(numbers(), "5 6 7 8", 0)], 0)
    assert Counter(call.outcome for call in outcome.calls) == {"parsed": 6, "unreachable": 2}
    assert outcome.hidden == 0.5


@pytest.fixture
def end_time(monkeypatch) -> Callable[[], object]:
    """Give a function that ends the time of the step that waits for its judge, whatever its limit is."""
    running = []
    monkeypatch.setattr(Step, "_start_clock", lambda step, limit: running.append((asyncio.get_running_loop(), limit)))
    return lambda: running[-1][0].call_soon_threadsafe(running[-1][1].reschedule, 0)


def test_a_step_that_lasts_too_long_ends_and_can_be_scored_again(scorer, end_time):
    silent, answered = True, []

    async def hang(asked, reply):
        if silent and "\n\nCANDIDATE\n50\n" in asked.prompt:
            await asyncio.sleep(EVENT_LIMIT)  # so that a step without an end would fail its test
        answered.append(asked)
        if len(answered) == 5:
            end_time()
        return reply

    made = scorer(Judge(Fake(after=hang), guard=False), step_timeout=1.0)
    groups = [group(numbers("n"), "50 5", 4, 0), group(numbers("m"), "60 61 4", 4, 0)]
    with pytest.raises(JudgeError) as error:
        made.score(groups, 4)
    parts = ["scripted judge", "judge_step_timeout=1 s", "5 judgments were answered", "0 failed"]
    assert [part for part in parts if part not in str(error.value)] == []
    calls = list(made.store.rows("SELECT step, phase, query_id, kind, outcome, attempts FROM calls ORDER BY rowid"))
    assert calls == [
        (4, "train", "m", "fine", "parsed", 1),
        *[(4, "train", "m", "insert", "parsed", 1)] * 3,
        (4, "train", "n", "insert", "cancelled", 1),
        (4, "train", "n", "insert", "parsed", 1),
    ]
    assert nothing_else(made)
    assert (made.store.totals().calls, made.store.totals().failures) == (5, 0)
    silent = False
    assert [score.rewards for score in made.score(groups, 4).scores] == [(1.0, -1.0), (0.0, 1.0, -1.0)]
    assert made.store.load("n").visits == made.store.load("m").visits == 1


class Withheld:
    """A server that holds all requests back until all of them are there, and notes whose connection is dropped."""

    def __init__(self, requests: int, then: Callable[[], None] = lambda: None, failing: str = ""):
        self.requests, self.then, self.failing = requests, then, failing
        self.arrived = self.dropped = 0
        self.all_here, self.all_gone = asyncio.Event(), threading.Event()

    async def __call__(self, prompt: str) -> web.Response:
        self.arrived += 1
        if self.arrived == self.requests:
            self.all_here.set()
            self.then()
        if self.failing and f"\n\nCANDIDATE\n{self.failing}\n" in prompt:
            await self.all_here.wait()
            return web.Response(status=404)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.dropped += 1
            if self.dropped == self.requests - bool(self.failing):
                self.all_gone.set()
            raise


EIGHT = "1 2 3 4 5 6 7 8"
WAYS = {  # how a step ends when all is in flight: (a candidate that fails, limits, the error, the ledger)
    "failures": ("5", {"max_failures": 0.0}, "failed 1 of 1 judgments", {"unreachable": 1, "cancelled": 7}),
    "timeout": ("", {"step_timeout": 2.0}, "timeout=2 s: 0 judgments were answered, 0 failed", {"cancelled": 8}),
    "interrupt": ("", {}, "", {"cancelled": 8}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_ends_early_drops_what_is_in_flight(scorer, way, end_time):
    failing, limits, message, calls = WAYS[way]
    main, before = threading.main_thread().ident, signal.getsignal(signal.SIGINT)
    then = {"timeout": end_time, "interrupt": lambda: signal.pthread_kill(main, signal.SIGINT)}
    withheld = Withheld(8, then.get(way, bool), failing)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores SIGINT
    try:
        with judged_by(withheld) as url:
            made = scorer(Judge(OpenAIClient(url, "m", max_retries=3), guard=False), **limits)
            with pytest.raises(JudgeError if message else KeyboardInterrupt, match=message):
                made.score([group(numbers(), EIGHT, 0)], 0)
            assert withheld.all_gone.wait(EVENT_LIMIT), f"{withheld.dropped} of 8 were dropped"
            assert ledger(made) == calls and nothing_else(made) and withheld.arrived == 8
    finally:
        signal.signal(signal.SIGINT, before)


def test_leave_step_ends_the_waits_of_training_steps_that_may_be_left(scorer):
    withheld, groups = Withheld(8, then=lambda: made.leave_step()), [group(numbers(), EIGHT, 0)]
    with judged_by(withheld) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=3), guard=False), may_leave=lambda step: step == 0)
        with pytest.raises(StepLeft):
            made.score(groups, 0)
        assert withheld.all_gone.wait(EVENT_LIMIT), f"{withheld.dropped} of 8 were dropped"
        assert nothing_else(made) and ledger(made) == {"cancelled": 8}
        with pytest.raises(StepLeft):
            made.begin(groups, 0)
        assert withheld.arrived == 8, "no other step begins"
        made.judge = scripted_judge(by_number)
        for step, update in ((1, True), (0, False)):
            assert made.score([group(numbers(), EIGHT, step)], step, update).calls, "this one is not left"
        made.leave_step(False)
        assert made.score([group(numbers(), EIGHT, 0)], 0).calls, "a run that begins later waits again"


def test_a_dropped_step_frees_all_slots(scorer):
    answering = False

    async def later(prompt):
        return number(prompt) if answering else await hang(None, 0)

    with judged_by(later) as url:
        made = scorer(Judge(OpenAIClient(url, "m", max_retries=0, concurrency=2), guard=False), step_timeout=0.5)
        with pytest.raises(JudgeError, match="judge_step_timeout"):
            made.score([group(numbers(), EIGHT, 0, 0)], 0)
        assert ledger(made) == {"cancelled": 2}, "what waited for its turn was not sent, so it leaves no call"
        answering, made.step_timeout = True, PATIENT
        outcome = made.score([group(numbers(), EIGHT, 0, 0)], 0)
        assert outcome.scores[0].rewards == tuple(-1 + 2 * i / 7 for i in range(8))
        assert Counter(call.outcome for call in outcome.calls) == {"parsed": 9}


def test_an_error_of_the_program_is_not_taken_for_the_judges(scorer):
    """The calls of its step are in the ledger, and do not count in the next step."""

    def crash(messages):
        return KeyError("a bug") if "\n8\n" in messages[0]["content"] else by_number(messages)

    made = scorer(scripted_judge(crash))
    with pytest.raises(KeyError, match="a bug"):
        made.score([group(numbers(), EIGHT, 0), group(numbers("m"), EIGHT, 0)], 0)
    assert nothing_else(made)
    made.judge.client.answer = by_number
    assert len(made.score([group(numbers(), "50 5", 1)], 1).calls) == 2
    assert list(made.store.rows("SELECT count(*) FROM calls WHERE step = 1")) == [(2,)]


# Answers that no server should give


def test_half_an_emoji_from_any_client_does_not_end_a_step(scorer):
    for answer in (SURROGATE, TransportError(SURROGATE)):
        says = lambda asked, answer=answer: answer if "\n5\n" in asked[0]["content"] else by_number(asked)  # noqa: E731
        made = scorer(scripted_judge(says))
        outcome = made.score([group(numbers(), EIGHT, 0)], 0)
        assert sum(call.failed for call in outcome.calls) == 1
        assert [i for i, reward in enumerate(outcome.scores[0].rewards) if reward is None] == [4]
        ((error,),) = made.store.rows("SELECT error FROM calls WHERE outcome != 'parsed'")
        assert error.isprintable()


def test_no_token_count_makes_the_ledger_overflow(scorer, tmp_path):
    for number, count in enumerate([5 * 10**18, float("inf"), -1, True, None, MOST_TOKENS]):

        async def counted(asked, reply, count=count):
            return reply.text, Usage(count, count, count)

        made = scorer(Judge(Fake(after=counted), guard=False))
        made.score([group(numbers(), f"{EIGHT} 9", 0)], 0)
        totals = made.store.totals()
        expected = totals.calls * MOST_TOKENS if count == MOST_TOKENS else 0
        assert totals.calls > 8
        assert (totals.prompt_tokens, totals.spent_completion_tokens) == (expected, expected), count
        made.store.save(tmp_path / f"saved-{number}")
