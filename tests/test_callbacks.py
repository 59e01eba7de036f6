"""A run that is warned by SIGTERM saves a checkpoint and ends in peace. A run logs its progress."""

import itertools
import os
import signal
from collections.abc import Callable, Container
from pkgutil import resolve_name
from types import SimpleNamespace

import pandas
import pytest
from helpers.checkpoints import newest_checkpoint
from helpers.sampled import AtStep
from helpers.scripted import contents
from transformers import TrainerCallback, TrainerControl
from trl import ScriptArguments

from rankbuffer_tools.train.command import comparison, last_lines
from rankbuffer_trl.checkpointing._stop import StopEarly
from rankbuffer_trl.monitoring._buffer_table import TABLE_FILE
from rankbuffer_trl.monitoring._non_fatal import non_fatal
from rankbuffer_trl.monitoring.progress import newest_window
from rankbuffer_trl.store._places import LIVE_STORE


def terminate_at(step: int) -> TrainerCallback:
    """SIGTERM to this process at the end of an optimizer step."""
    return AtStep(step, lambda control: os.kill(os.getpid(), signal.SIGTERM))


def test_stop_early_saves_at_an_evaluation_that_finds_nothing_better(tmp_path, training, rows):
    """With `save_strategy: best`, the evaluation of a step decides whether to save."""
    settings = dict(save_strategy="best", eval_strategy="steps", eval_steps=1, metric_for_best_model="constant")
    settings |= dict(per_device_eval_batch_size=8, eval_dataset=rows.select([0]), callbacks=[terminate_at(3)])
    trainer = training(**settings)
    trainer.evaluate = trainer._evaluate = lambda *args, **kwargs: {"eval_constant": 1.0}
    trainer.train()
    assert trainer.interrupted and trainer.state.global_step == 3
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


def test_stop_early_stops_at_the_end_of_a_generation_and_for_a_budget_before_the_last_step():
    callback = StopEarly(lambda step: step % 2 == 0, over_budget=lambda: "it is used up")
    for received, stops in ((None, [2]), (0.0, [2, 4])):
        callback.received, stopped = received, []
        for step in range(1, 5):
            state = SimpleNamespace(global_step=step, max_steps=4, is_world_process_zero=True)
            callback.on_step_end(SimpleNamespace(save_strategy="no"), state, control := TrainerControl())
            assert control.should_save == control.should_training_stop
            stopped += [step] * control.should_save
        assert stopped == stops


def test_stop_early_takes_a_second_sigterm_seriously_only_after_a_while(monkeypatch):
    """The process group's and the launcher's can be one warning."""
    now, ended = [100.0], []
    monkeypatch.setattr("rankbuffer_trl.checkpointing._stop.time.monotonic", lambda: now[0])
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(now[0]))
    try:
        callback = StopEarly(lambda step: True)
        callback.on_train_begin(None, None, None)
        for now[0] in (100.0, 101.0, 104.0, 106.0):
            signal.raise_signal(signal.SIGTERM)
        assert ended == [106.0]
        callback.restore_handler()
        callback.on_train_begin(None, None, None)
        assert callback.received is None, "another training has had no warning yet"
        callback.restore_handler()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_last_lines_of_a_run_that_was_stopped_in_its_first_step_name_no_checkpoint(tmp_path):
    stopped = SimpleNamespace(interrupted=True, args=SimpleNamespace(output_dir=tmp_path))
    stopped.state = SimpleNamespace(global_step=4, max_steps=9)
    data = ScriptArguments("data")
    assert last_lines(stopped, data, "policy")[1] == "to continue: the same command"
    (tmp_path / "checkpoint-4").mkdir()
    stopped.args.output_dir = tmp_path / "my run"
    (tmp_path / "my run" / "checkpoint-4").mkdir(parents=True)
    report = f"rankbuffer-report '{tmp_path}/my run' --dataset_name 'a b.jsonl'"
    assert report in last_lines(stopped, ScriptArguments("a b.jsonl"), "")[2]
    stopped.interrupted, judge = False, {"judge_url": ["http://a/v1", "http://b/v1"], "judge_model": "judge"}
    judge |= {"judge_api_key_env": "OPENAI_API_KEY", "judge_request": {"top_k": 1}}
    vars(stopped.args).update(judge, eval_strategy="no", chat_template_kwargs={"enable_thinking": False})
    evaluation = last_lines(stopped, data, "policy")[3]
    judge = "--judge_url http://a/v1 http://b/v1 --judge_model judge --judge_request '{\"top_k\": 1}'"
    judge += " --chat_template_kwargs '{\"enable_thinking\": false}'"
    end = f"/_evaluation {judge} --models my-run='{tmp_path}/my run'"
    assert "needs the official files" in evaluation and evaluation.endswith(end)
    stopped.interrupted, stopped.args.output_dir = True, tmp_path
    assert last_lines(stopped, data, "policy")[0] == f"stopped after step 4 of 9, with {tmp_path}/checkpoint-4"


def test_comparison_is_the_command_with_the_runs_own_data_judge_and_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    urls = ["http://a/v1", "http://b/v1"]
    args = SimpleNamespace(output_dir="out", judge_url=urls, judge_model="j", eval_strategy="no")
    given = ScriptArguments("me/set", dataset_config="small", dataset_test_split="held")
    end = "--models before=me/policy after=out --judge_url http://a/v1 http://b/v1 --judge_model j"
    start = "rankbuffer-compare --run_dir out --dataset_name"
    assert comparison(args, given, "me/policy") == f"{start} me/set --dataset_config small {end}"
    args.eval_strategy = "steps"
    said = comparison(args, given, "me/policy")
    assert said == f"{start} me/set --dataset_config small --dataset_train_split held {end}"
    (tmp_path / "a_kept_apart.jsonl").touch()
    assert comparison(args, ScriptArguments("a.jsonl"), "me/policy") == f"{start} a_kept_apart.jsonl {end}"
    args.judge_url = args.judge_model = None
    assert comparison(args, ScriptArguments("."), "p").endswith(" test --models before=p after=out")


PROGRESS = "progress/beats_last_visit"


def test_progress_reaches_the_log_of_its_own_step(training, rows, monkeypatch):
    """The number begins with the second epoch, after step 4. It stays in its step also if an evaluation follows."""
    found = []
    small = lambda *seen: found.append(newest_window(*seen, least=6)) or found[-1]  # noqa: E731
    monkeypatch.setattr("rankbuffer_trl.training._reward_function.newest_window", small)
    monkeypatch.setattr("rankbuffer_trl.monitoring.progress.LEAST_QUERIES", 2)
    evaluation = dict(eval_strategy="steps", eval_steps=6, per_device_eval_batch_size=8)
    trainer = training(eval_dataset=rows.select([0]), **evaluation)
    trainer.train()
    expected = [each and each.probability for each in found]
    assert expected[:4] == [None] * 4 and any(value is not None for value in expected[4:])
    logged = [entry.get(PROGRESS) for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(expected), "which TRL gathers as float32"
    assert not any(name.startswith("eval_progress") for entry in trainer.state.log_history for name in entry)


# What only informs: the calls that fail, counted from 0, of each function of `rankbuffer_trl`
BROKEN = {
    "training._reward_function.newest_window": range(1, 99),
    "training._reward_function.step_metrics": range(1, 99, 2),
    "training._reward_function.probe_metrics": (0,),
    "training._reward_function.placement_columns": (1,),
    "monitoring._buffer_table.export_buffers": (0,),
    "training._trainer.write_model_card": (0,),
}


def breaking(name: str, calls: Container[int]) -> Callable:
    """A function as it is, but for these of its calls, which divide by zero."""
    function, count = resolve_name(f"rankbuffer_trl.{name}"), itertools.count()
    return lambda *args, **named: 1 // 0 if next(count) in calls else function(*args, **named)


def test_informing_goes_on_without_what_fails(tmp_path, training, monkeypatch, caplog):
    """Each fault is one warning, however often it comes, and the run is the same without it."""
    runs = []
    for folder in (tmp_path / "whole", tmp_path / "broken"):
        if folder.name == "broken":
            folder.mkdir()
            (folder / TABLE_FILE).write_text("an older table")
            for name, calls in BROKEN.items():
                monkeypatch.setattr(f"rankbuffer_trl.{name}", breaking(name, calls))
        trainer = training(folder.name, num_train_epochs=1, log_completions=True)
        with caplog.at_level("WARNING"):
            trainer.train()
            trainer.save_model()
            trainer.create_model_card()
        logged = ["judge/calls" in entry for entry in trainer.state.log_history if "loss" in entry]
        files = [(folder / name).is_file() for name in (TABLE_FILE, "README.md")]
        tables = [pandas.read_parquet(path) for path in sorted((folder / "completions").iterdir())]
        placed = [bool(table["tier"].notna().any()) for table in tables]
        runs.append((contents(folder / LIVE_STORE), logged, files, placed))
    whole, broken = runs
    assert whole[0] == broken[0]
    assert whole[1:] == ([True] * 4, [True, True], [True] * 4)
    assert broken[1:] == ([True, False, True, False], [False, False], [True, False, True, True])
    warnings = [record.getMessage() for record in caplog.records if record.name.endswith("non_fatal")]
    # Without the metrics of a step, it is also unknown whether its rollouts have a gradient.
    without = [line for line in warnings if "goes on without it: ZeroDivisionError: " in line]
    assert len(without) == len(BROKEN) == len(warnings) - 1


def test_informing_lets_an_interrupt_pass():
    for error in (KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)), non_fatal("nothing"):
            raise error
