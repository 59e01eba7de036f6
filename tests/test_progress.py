"""The progress of a run in a terminal, and that nothing of it reaches a file."""

import io
import re
from types import SimpleNamespace

import pytest
from transformers import ProgressCallback

from rankbuffer_trl.judge import Totals
from rankbuffer_trl.training.progress import RunProgress, run_progress

LOGS = {"judge/calls": 120.0, "judge/seconds": 4.0, "judge/hidden": 0.25, "buffer/size": 5.25, "reward_std": 0.654}


class Terminal(io.StringIO):
    isatty = lambda self: True  # noqa: E731


@pytest.fixture
def in_terminal(monkeypatch):
    """Give a function that lets the test write to a terminal. A fixture is too early, since pytest captures later."""

    def begin() -> Terminal:
        made = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(f"sys.{name}", made)
        monkeypatch.setenv("COLUMNS", "200")
        return made

    return begin


def progress(price=lambda totals: None, totals=Totals()) -> RunProgress:  # noqa: B008
    return RunProgress(lambda: totals, price)


def test_status_says_what_a_run_does_and_costs():
    totals = Totals(calls=1234, failures=2, prompt_tokens=1_500_000, completion_tokens=34_000)
    line = progress(lambda totals: totals.calls / 100, totals).status(LOGS)
    judge = "waits 4.0 s for the judge (25% hidden)  1,234 calls  1.5M tokens  2 failed  cost 12.34"
    assert line == f"spread 0.65  5.25 anchors  {judge}"
    bare = {"judge/calls": 0.0, "judge/seconds": 0.0, "judge/hidden": 0.0, "reward_std": None, "buffer/size": 0.0}
    assert progress().status(bare) == "waits 0.0 s for the judge (0% hidden)  0 calls  0 tokens"
    assert "beats its last visit 75%" in progress().status(bare | {"progress/beats_last_visit": 0.75})


def test_run_progress_shows_each_log_entry_behind_the_bar_and_each_epoch_leaves_one_line(in_terminal):
    """Another entry, such as that of an evaluation, changes nothing."""
    terminal = in_terminal()
    bar, main = progress(), dict(is_world_process_zero=True, max_steps=8, num_train_epochs=2)
    bar.on_train_begin(None, SimpleNamespace(**main), None)
    for step in range(1, 9):
        state = SimpleNamespace(global_step=step, epoch=step / 4, **main)
        bar.on_log(None, state, None, logs=LOGS)
        assert bar.training_bar.postfix == bar.status(LOGS)
        bar.on_step_end(None, state, None)
        bar.on_log(None, state, None, logs={"eval_judge/calls": 3.0})
    bar.on_train_end(None, state, None)
    bar.on_log(None, state, None, logs=LOGS)
    assert re.findall(r"epoch (\d/2)  step (\d)  spread 0.65", terminal.getvalue()) == [("1/2", "4"), ("2/2", "8")]


@pytest.fixture
def trainer(training):
    settings = dict(disable_tqdm=False, num_train_epochs=1, judge_prompt_price=2.0, per_device_train_batch_size=48)
    return training(**settings)


def test_run_progress_shows_a_real_run_in_a_terminal(trainer, in_terminal):
    terminal = in_terminal()
    with run_progress(trainer):
        trainer.train()
    text, totals = terminal.getvalue(), trainer.rank_reward.scorer.store.totals()
    assert "2/2" in text and f"{totals.calls:,} calls" in text and "'loss'" not in text
    assert f"cost {2 * totals.prompt_tokens / 1e6:,.2f}" in text
    assert len(re.findall(r"epoch 1/1  step 2  spread", text)) == 1


def test_run_progress_ends_its_line_after_an_error(trainer, in_terminal):
    terminal = in_terminal()
    with pytest.raises(KeyboardInterrupt), run_progress(trainer):
        (bar,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, RunProgress)]
        state = SimpleNamespace(is_world_process_zero=True, max_steps=2)
        bar.on_train_begin(None, state, None)
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\n")


def test_run_progress_with_a_fault_does_not_end_a_run(trainer, in_terminal, monkeypatch, caplog):
    in_terminal()
    monkeypatch.setattr(RunProgress, "status", lambda self, logs: 1 / 0)
    with run_progress(trainer), caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("the progress bar only informs") == 1 and "ZeroDivisionError: division" in caplog.text


@pytest.mark.parametrize("kind", ["a file", "disable_tqdm"])
def test_run_progress_leaves_the_trainer_as_it_is_without_a_terminal_or_a_bar(kind, trainer, in_terminal, monkeypatch):
    terminal = in_terminal()
    monkeypatch.setattr(terminal, "isatty", lambda: kind != "a file", raising=False)
    trainer.args.disable_tqdm = kind == "disable_tqdm"
    with run_progress(trainer):
        kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert ProgressCallback in kinds and RunProgress not in kinds
