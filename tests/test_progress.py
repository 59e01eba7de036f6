"""The progress of a run in a terminal, and that nothing of it reaches a file."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import ProgressCallback

from rankbuffer_trl.judge import Totals
from rankbuffer_trl.training.progress import RunProgress, run_progress, short

LOGS = {"judge/calls": 120.0, "judge/seconds": 4.0, "judge/hidden": 0.25, "buffer/size": 5.25, "reward_std": 0.654}


def terminal(**kwargs) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, **kwargs)


def shown(console: Console) -> str:
    """What was written, without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def state(step: int, epoch: float, max_steps: int = 8) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, epoch=epoch, max_steps=max_steps)


def progress(console: Console, price=lambda totals: None, totals=Totals()) -> RunProgress:  # noqa: B008
    return RunProgress(2.0, lambda: totals, price, console)


def test_status_says_what_a_run_does_and_costs():
    totals = Totals(calls=1234, failures=2, prompt_tokens=1_500_000, completion_tokens=34_000)
    line = progress(terminal(), lambda totals: totals.calls / 100, totals).status(LOGS)
    judge = "waits 4.0 s for the judge (25% hidden)  1,234 calls  1.5M tokens  2 failed  cost 12.34"
    assert line == f"spread 0.65  5.25 anchors  {judge}"
    bare = {"judge/calls": 0.0, "judge/seconds": 0.0, "judge/hidden": 0.0, "reward_std": None, "buffer/size": 0.0}
    assert progress(terminal()).status(bare) == "waits 0.0 s for the judge (0% hidden)  0 calls  0 tokens"
    assert [short(n) for n in (999, 1000, 12_345_678, 4_000_000_000)] == ["999", "1.0k", "12.3M", "4.0G"]


def follow(bar: RunProgress, first: int) -> None:
    """Train from a step to step 8, four steps an epoch."""
    bar.on_train_begin(None, state(first, first / 4), None)
    for step in range(first + 1, 9):
        bar.on_log(None, state(step, step / 4), None, logs=dict(LOGS))
        bar.on_step_end(None, state(step, step / 4), None)
        if bar.bar is not None:
            (task,) = bar.bar.tasks
            assert (task.completed, task.total) == (step, 8)
            assert task.fields["epoch"] == ("1/2" if step < 4 else "2/2")
    bar.on_train_end(None, state(8, 2.0), None)


def test_run_progress_counts_steps_and_epochs_and_each_epoch_leaves_one_line():
    console = terminal()
    bar = progress(console)
    bar.status = lambda logs: "[bold]x[/nonsense]"  # which is no markup
    follow(bar, 2)
    kept = re.findall(r"epoch (\d)/2  step (\d)  \[bold\]x\[/nonsense\]", shown(console))
    assert kept == [("1", "4"), ("2", "8")]
    assert bar.bar is None


def test_run_progress_writes_one_line_an_epoch_and_no_bar_to_a_console_that_is_no_terminal():
    console = Console(file=io.StringIO(), width=20)
    follow(progress(console), 0)
    lines = console.file.getvalue().splitlines()
    assert [line.partition("  spread 0.65")[0] for line in lines] == ["epoch 1/2  step 4", "epoch 2/2  step 8"]


def test_run_progress_shows_an_evaluation_whose_log_changes_nothing():
    bar = progress(terminal())
    bar.on_train_begin(None, state(0, 0), None)
    for _ in range(2):
        bar.on_prediction_step(None, state(1, 0.25), None)
    assert bar.bar.status == "evaluating, batch 2"
    bar.on_log(None, state(1, 0.25), None, logs={"eval_judge/calls": 3.0})
    assert bar.bar.status == "evaluating, batch 2"
    bar.close()


@pytest.fixture
def trainer(training):
    settings = dict(disable_tqdm=False, num_train_epochs=1, judge_prompt_price=2.0, per_device_train_batch_size=48)
    return training(**settings)


def test_run_progress_shows_a_real_run_in_a_terminal_and_leaves_it_in_order(trainer):
    console = terminal()
    with run_progress(trainer, console):
        trainer.train()
    text, totals = shown(console), trainer.rank_reward.scorer.store.totals()
    assert "2/2" in text and f"{totals.calls:,} calls" in text
    assert f"cost {2 * totals.prompt_tokens / 1e6:,.2f}" in text
    assert len(re.findall(r"^.*epoch 1/1  step 2  spread", text, re.MULTILINE)) == 1
    assert console.file.getvalue().rstrip("\n").endswith("\x1b[?25h")  # the cursor is back
    assert not [each for each in trainer.callback_handler.callbacks if isinstance(each, RunProgress)]

    console = terminal()
    with pytest.raises(KeyboardInterrupt), run_progress(trainer, console):
        bar = next(each for each in trainer.callback_handler.callbacks if isinstance(each, RunProgress))
        bar.on_train_begin(None, state(0, 0), None)
        raise KeyboardInterrupt
    assert bar.bar is None and "\x1b[?25h" in console.file.getvalue()


def test_run_progress_with_a_fault_does_not_end_a_run(trainer, monkeypatch, caplog):
    monkeypatch.setattr(RunProgress, "status", lambda self, logs: 1 / 0)
    console = terminal()
    with run_progress(trainer, console), caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.state.global_step == 2 and console.file.getvalue().rstrip("\n").endswith("\x1b[?25h")
    assert caplog.text.count("the progress bar only informs") == 1 and "ZeroDivisionError: division" in caplog.text


def test_run_progress_writes_nothing_to_a_file_and_the_trainer_prints_as_ever(trainer):
    console = Console(file=io.StringIO())
    with run_progress(trainer, console):
        kinds = [type(each) for each in trainer.callback_handler.callbacks]
    assert ProgressCallback in kinds and RunProgress not in kinds
    assert console.file.getvalue() == ""
    trainer.args.disable_tqdm = True
    with run_progress(trainer, terminal()):
        assert RunProgress not in [type(each) for each in trainer.callback_handler.callbacks]
