"""The record of what the judge has taken: nothing takes it back, and a run with a used-up budget does not start."""

import mmap
import os
import signal
import struct
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import by_number, group, numbers, scripted_judge
from helpers.checkpoints import checkpoints_of
from helpers.forks import fork
from helpers.sampled import AtStep
from helpers.scripted import ScriptedTrainer, config, contents
from helpers.visits import call, visit_all

from rankbuffer_tools.train import command
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import JudgeError, Usage
from rankbuffer_trl.judge._rubric_judge import RubricJudge
from rankbuffer_trl.rewards._rankbuffer import RankBuffer
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.store._places import LIVE_STORE, read_store
from rankbuffer_trl.training._first import first_question
from rankbuffer_trl.training._scorer import GroupScorer

TOKENS = Usage(10, 4, 3)  # of a reply of the scripted judge


def tokens(store: BufferStore) -> tuple[int, int, int]:
    spent = store.spent
    return spent.spent_prompt_tokens, spent.spent_cached_tokens, spent.spent_completion_tokens


def test_spent_only_grows_until_somebody_deletes_the_file(tmp_path):
    live = tmp_path / "live.sqlite"
    store = BufferStore(live)
    visit_all(store, "a", range(1))
    store.commit(1, [], [call()], phase="eval")
    store.save(tmp_path / "saved")
    visit_all(store, "a", range(1, 2))
    store.spend(Usage(10**9, 199, 3))
    store.spend(Usage(1, 1, 10**15))  # a shorter number must not leave digits of a longer one
    all_of_it = (10**9 + 1, 200, 10**15 + 3)
    for change in (lambda: store.restore(tmp_path / "saved"), lambda: store.rewind(1), store.close):
        change()
        assert tokens(store) == all_of_it
    store = BufferStore(live)
    assert tokens(store) == all_of_it
    store.close()
    live.rename(tmp_path / "damaged.sqlite")  # as docs/faults.md advises
    store = BufferStore(live)
    for change in (lambda: store.restore(tmp_path / "saved"), lambda: store.rewind(0), lambda: store.rewind(0)):
        change()
        assert tokens(store) == all_of_it, "another run, the same one again, and new ones"
        store.spend(Usage())
    store.restore(tmp_path / "saved")
    store.close()
    live.with_suffix(".spent").unlink()
    store = BufferStore(live)
    assert tokens(store) == (400, 120, 28), "a run that goes on counts its ledger"
    store.spend(TOKENS)  # the first question of a new run
    store.rewind(0)
    assert tokens(store) == TOKENS
    store.close()


def test_commit_waits_until_the_record_is_on_the_disk(tmp_path, monkeypatch):
    store, synced = BufferStore(tmp_path / "live.sqlite"), []
    store.commit(0, [], [])
    store.spend(TOKENS)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    store.commit(1, [], [])
    assert synced == [tmp_path / "live.spent"]
    store.close()


def test_spent_names_a_damaged_record(tmp_path):
    for content in (b"x", b"0" * 128, b"\n", b"0" * 64 + b" 9" + b"0" * 19 + (b" " + b"0" * 20) * 2 + b"\n"):
        (tmp_path / "live.spent").write_bytes(content)
        with pytest.raises(StoreError, match=r"live\.spent is damaged: delete it"):
            BufferStore(tmp_path / "live.sqlite")
    (tmp_path / "live.spent").write_bytes(b"")  # of a run that was killed when it made the file
    BufferStore(tmp_path / "live.sqlite").close()
    (tmp_path / "live.spent").unlink()
    (tmp_path / "live.spent").mkdir()
    store = BufferStore(tmp_path / "live.sqlite")
    with pytest.raises(StoreError, match=r"cannot write the spending beside the buffer store .*directory"):
        store.spend(TOKENS)
    store.close()


def test_spend_notices_that_the_record_was_replaced_and_knows_other_stores_of_the_process(tmp_path, caplog):
    live, spent = tmp_path / "live.sqlite", tmp_path / "live.spent"
    first, second = BufferStore(live), BufferStore(live)
    first.spend(TOKENS)
    backup = spent.read_bytes()
    for _ in range(2):
        second.spend(TOKENS)
        first.spend(TOKENS)
    for change in (lambda: backup, lambda: None):
        spent.rename(tmp_path / "old")
        if content := change():
            spent.write_bytes(content)
        first.spend(TOKENS)
        first.spend(TOKENS)
    assert sum("live.spent was replaced or deleted" in text for text in caplog.messages) == 2
    for store in (first, second):
        store.close()
    again = BufferStore(live)
    assert tokens(again) == tuple(9 * count for count in TOKENS)
    again.close()


def test_spend_between_two_replies_loses_neither_to_a_kill(tmp_path):
    """Five starts without a checkpoint are killed inside their first step, at the reply after the tenth of each.

    Another start finds the budget used up.
    """
    replies = mmap.mmap(-1, 8)  # shared with the processes
    for legs in range(1, 6):
        start_of(tmp_path, None, judge_token_budget=5 * 10 * (TOKENS.prompt + TOKENS.completion))

        def leg(last=11 * legs):
            def answer(messages):
                (number,) = struct.unpack("q", replies)
                if number + 1 == last:
                    replies[:] = struct.pack("q", last)
                    os.kill(os.getpid(), signal.SIGKILL)
                replies[:] = struct.pack("q", number + 1)
                return by_number(messages)

            made = GroupScorer(RankBuffer(), scripted_judge(answer), BufferStore(tmp_path / LIVE_STORE))
            first_question(made, numbers())
            made.store.rewind(0)
            made.score([group(numbers(), " ".join(map(str, range(20))), step=0)], step=0)

        _, status = os.waitpid(fork(leg, tmp_path / "log"), 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, (tmp_path / "log").read_text()
        store = BufferStore(tmp_path / LIVE_STORE)
        assert tokens(store) == tuple(10 * legs * count for count in TOKENS) and store.totals().attempts == 0
        store.close()
    said = rf"nothing was started: .* delete {tmp_path}/.*live\.spent to count from 0"
    with pytest.raises(SettingsError, match=said):
        start_of(tmp_path, None, judge_token_budget=5 * 10 * (TOKENS.prompt + TOKENS.completion))


class Spent:
    """The tokens that the embedded judge has really taken. It fails if `fails` is 1, or 2 after the next reply."""

    def __init__(self, monkeypatch):
        self.tokens, self.fails = 0, 0
        answer = RubricJudge.answer

        def counted(judge, messages):
            text, usage = answer(judge, messages)
            self.tokens += usage.prompt + usage.completion
            failing, self.fails = self.fails == 1, min(self.fails, 1)
            return ("no verdict" if failing else text), usage

        monkeypatch.setattr(RubricJudge, "answer", counted)


def train(folder, policy, rows, resume=None, callback=None, **changes):
    args = config(folder, save_strategy="steps", save_steps=2, max_steps=4, **changes)
    trainer = ScriptedTrainer(policy, args, rows, callbacks=[callback] if callback else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
        return trainer.interrupted
    finally:
        trainer.close()


def interrupt(control) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_check_budget_counts_what_each_leg_has_spent_and_refuses_a_used_up_one(
    tmp_path, tiny_policy, rows, monkeypatch, caplog
):
    """Legs that never reach their next checkpoint, by an interrupt after a commit or by a failing judge."""
    real = Spent(monkeypatch)
    assert not train(tmp_path / "whole", tiny_policy, rows)
    budget, real.tokens = 2 * real.tokens, 0
    run = partial(train, tmp_path / "cut", tiny_policy, rows)
    with pytest.raises(KeyboardInterrupt):
        run(callback=AtStep(3, interrupt), judge_token_budget=budget)
    legs = []
    while real.tokens < budget:
        legs.append(real.tokens)
        assert len(legs) < 20
        real.fails = 2 * (len(legs) % 2)
        with pytest.raises(JudgeError if real.fails else KeyboardInterrupt):
            run(resume=True, callback=AtStep(3, interrupt), judge_token_budget=budget)
    assert len(legs) >= 3

    live, taken, real.fails = tmp_path / "cut" / LIVE_STORE, real.tokens, 0
    before = contents(live)
    for start in (run, lambda **kwargs: start_of(tmp_path / "cut", **kwargs)):  # the trainer, and the command
        for resume in (True, None):
            said = rf"has taken {taken:,} tokens.*so nothing was started: raise the budget"
            with pytest.raises(SettingsError, match=said):
                start(resume=resume, judge_token_budget=taken)
    assert real.tokens == taken and contents(live) == before
    assert run(resume=True, judge_token_budget=taken + 1), "one token is left, so one more step is taken"
    assert f"judge_token_budget={taken + 1:,}: stopping after step 3 with a checkpoint" in caplog.text
    assert not run(resume=True, judge_token_budget=real.tokens + 1), "the last step ends the run by itself"
    assert contents(live) == contents(tmp_path / "whole" / LIVE_STORE)
    run(resume=True, judge_token_budget=1)  # no step is left that could spend anything
    assert real.tokens > taken

    checkpoint = tmp_path / "cut" / "checkpoint-2"
    saved = read_store(checkpoint)
    ledger = saved.totals().spent_tokens
    saved.close()
    with pytest.raises(SettingsError, match=f"has taken {ledger:,} tokens"):
        start_of(tmp_path / "elsewhere", checkpoint, judge_token_budget=ledger)
    assert start_of(tmp_path / "elsewhere", checkpoint, judge_token_budget=ledger + 1) == (str(checkpoint), 2)
    assert start_of(tmp_path / "cut", judge_token_budget=1) == (str(tmp_path / "cut" / "checkpoint-4"), 4)


def start_of(folder, resume=True, **changes):
    """What the command finds before it loads anything."""
    args = config(folder, resume_from_checkpoint=str(resume), **changes)
    plan = SimpleNamespace(args=args, checkpoints=checkpoints_of(folder), batches=SimpleNamespace(steps=4))
    return command.find_start(plan)
