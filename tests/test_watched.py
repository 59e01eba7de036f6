"""What production watches: the log of steps as a file, the command at the end, the exit code, the judge's headers."""

import json
import pickle
import stat

import httpx
import pytest
from conftest import ask_all
from helpers.servers import GOOD, completion, served

from rankbuffer_tools.train import command, ending, metrics
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.exact.checkpoint import describe
from rankbuffer_trl.exact.manifest import checkpoints
from rankbuffer_trl.informs.steplog import FILE, StepLog
from rankbuffer_trl.judge import JudgeError, Totals
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.judge.questions import insertion_question
from rankbuffer_trl.training.rollouts import RolloutError


def steps(folder) -> list[int]:
    """The steps of the lines of a run's log."""
    return [json.loads(line)["step"] for line in (folder / FILE).read_text().splitlines()]


def test_a_run_has_one_line_a_step_also_after_a_resume_and_a_new_start(tmp_path, training):
    log = tmp_path / FILE
    first = training(max_steps=4, save_strategy="steps", save_steps=2, logging_steps=1)
    first.train()
    first.close()
    assert steps(tmp_path) == [1, 2, 3, 4], "and no line of the end"
    line = json.loads(log.read_text().splitlines()[1])
    assert {"step", "time", "loss", "judge/calls", "rank/ties"} <= line.keys()
    before = ['{"step": 0, "eval_loss": 1.0}', *log.read_text().splitlines()]  # as with eval_on_start
    log.write_text("\n".join([*before, '{"step": 5, "lo']))  # a kill cut the line of the fifth step off
    again = training(max_steps=6, logging_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    again.close()
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 6] and log.read_text().splitlines()[:3] == before[:3]
    assert log.read_text().splitlines()[3:5] != before[3:5], "steps 3 and 4 are those of the second attempt"
    new = training(max_steps=1, logging_steps=1)
    new.train()
    assert steps(tmp_path) == [1]


def test_a_program_beside_a_training_gives_its_newest_numbers_to_prometheus(tmp_path):
    log = tmp_path / FILE
    with served(metrics.make_app(tmp_path)) as url:
        read = lambda: httpx.get(f"{url}/metrics")  # noqa: E731
        assert (read().status_code, read().text) == (200, ""), "before the first step"
        log.parent.mkdir()
        old = [{"step": 1, "word": "x" * metrics.TAIL}, {"step": 1, "loss": 9}]
        whole = {"step": 2, "loss": -0.5, "rank/ties": 0.25, "lr": 1e-06, "bad": None, "word": "x", "flag": True}
        log.write_text("\n".join([*map(json.dumps, [*old, whole]), '{"step": 3, "lo']))  # a line that is being written
        answer = read()
        assert answer.headers["Content-Type"] == metrics.EXPOSITION
        lines = answer.text.splitlines()
        assert lines[::2] == [f"# TYPE {line.split()[0]} gauge" for line in lines[1::2]]
        numbers = {"rankbuffer_step": 2, "rankbuffer_loss": -0.5, "rankbuffer_rank_ties": 0.25, "rankbuffer_lr": 1e-6}
        assert {name: float(value) for name, value in map(str.split, lines[1::2])} == numbers


def test_a_log_that_cannot_be_written_ends_nothing_and_keeps_no_half_line(tmp_path, training, monkeypatch, caplog):
    class Full:
        """A file on a disk that takes ten bytes of each write."""

        def __init__(self, *args, **kwargs):
            self.file = open(*args, **kwargs)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            return self.file.write(content[:10])

    monkeypatch.setattr("rankbuffer_trl.informs.steplog.open", Full, raising=False)
    trainer = training(max_steps=1, logging_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and (tmp_path / FILE).read_bytes() == b""
    assert "metrics.jsonl only informs and could not be made" in caplog.text
    monkeypatch.undo()
    trainer.state.global_step = 2
    log = StepLog(str(tmp_path))
    log.on_log(trainer.args, trainer.state, trainer.control, {"loss": float("nan"), "word": "x"})
    assert json.loads((tmp_path / FILE).read_text()).items() >= {"step": 2, "loss": None, "word": "x"}.items()
    trainer.state.is_world_process_zero = False
    log.on_log(trainer.args, trainer.state, trainer.control, {"loss": 1.0})
    assert len((tmp_path / FILE).read_text().splitlines()) == 1, "another process writes nothing"


def test_the_command_at_the_end_gets_reason_step_and_price_and_no_shell(tmp_path, quickstart, monkeypatch, caplog):
    told, hook = tmp_path / "told", tmp_path / "hook"
    names = " ".join(f"$RANKBUFFER_{name}" for name in ("REASON", "STEP", "JUDGE_TOKENS", "JUDGE_PRICE"))
    hook.write_text(f'#!/bin/sh\necho "$*" {names} >> {told}\nexit 3\n')
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    words = ["--on_stop_command", f"{hook} $(touch {tmp_path}/shell); x", "--max_steps", "1"]
    prices = ["--judge_prompt_price", "2", "--judge_completion_price", "0"]
    quickstart(*words, *prices)
    quickstart(*words, "--dry_run")
    (line,) = told.read_text().splitlines()  # none of the dry run
    given, _, facts = line.partition("; x ")
    reason, step, tokens, price = facts.split()
    assert given == f"$(touch {tmp_path}/shell)" and not (tmp_path / "shell").exists()
    assert (reason, step, int(tokens) > 0) == ("finished", "1", True) and 0 < float(price) <= int(tokens) * 2e-6
    assert "on_stop_command only informs and could not be made" in caplog.text and "exit code 3" in caplog.text
    monkeypatch.setattr(command, "report", lambda plan: (_ for _ in ()).throw(JudgeError("gone")))
    with pytest.raises(JudgeError):
        quickstart(*words)
    assert told.read_text().splitlines()[-1].split("; x ")[1].split() == ["JudgeError", "0", tokens]
    for wrong, part in (
        ("no-such-program x", "there is no program ['no-such-program']"),
        ("a 'b", "close its quotes"),
    ):
        with pytest.raises(SettingsError, match="on_stop_command") as error:
            quickstart("--on_stop_command", wrong)
        assert part in str(error.value)


def test_a_command_that_hangs_is_ended_and_its_arguments_are_not_logged(tmp_path, training, monkeypatch, caplog):
    monkeypatch.setattr(ending, "HOOK_SECONDS", 0.1)
    args = training(on_stop_command="sleep 60.125").args
    ending.tell_command(args, "finished", 1)
    assert "it took longer than 0.1 s" in caplog.text and "60.125" not in caplog.text


def test_a_stop_is_told_as_a_signal_or_a_budget(tmp_path, training, monkeypatch):
    told = tmp_path / "told"
    monkeypatch.setattr(ending, "spent_before", lambda *_: Totals(spent_prompt_tokens=10))
    for budget, reason in ((11, "SIGTERM"), (10, "budget")):
        args = training(judge_token_budget=budget, on_stop_command=f"sh -c 'echo $RANKBUFFER_REASON > {told}'").args
        ending.tell_command(args, "SIGTERM", 1)
        assert told.read_text().strip() == reason


def test_the_status_file_says_how_to_go_on_after_a_server_failed(tmp_path, monkeypatch):
    file, run = tmp_path / "status", tmp_path / "run"
    (run / "checkpoint-2").mkdir(parents=True)
    assert checkpoints(run)
    monkeypatch.setenv(ending.STATUS_FILE, str(file))
    for error, step, content in (
        (JudgeError("gone"), 2, "75 --resume_from_checkpoint true\n"),
        (RolloutError("gone"), 0, "75\n"),  # the checkpoint may be that of an earlier run
        (RankBufferError("a fault"), 2, None),
    ):
        file.unlink(missing_ok=True)
        ending.tell_launcher(error, str(run), step)
        assert (file.read_text() if file.exists() else None) == content
    monkeypatch.setenv(ending.STATUS_FILE, str(tmp_path / "none" / "status"))
    ending.tell_launcher(JudgeError("gone"), str(run), 2)  # a full disk, say: the error itself is what counts


def test_headers_name_the_run_to_the_judge_and_hold_no_key(fault, query, training):
    server = {"judge_url": fault.url, "judge_model": "judge"}
    question = insertion_question(query, ["bad", "good"], "fair")
    config, got = JudgeConfig(**server, judge_headers='{"X-Run": "team a, run 7"}'), []
    fault.play(lambda request, n: got.append(request.headers.get("X-Run")) or completion(GOOD))
    ask_all(config.judge(), [question])
    ask_all(JudgeConfig(**server).judge(), [question])
    assert got == ["team a, run 7", None]
    args = training(judge_headers={"X-Run": "a"}, on_stop_command="sh /secret").args
    kept = pickle.loads(pickle.dumps(args))
    assert (kept.judge_headers, kept.on_stop_command, args.judge_headers) == (None, None, {"X-Run": "a"})
    assert not kept.endpoint.headers and args.endpoint.headers
    assert not {"judge_headers", "on_stop_command"} & describe({}, 0, args)["config"].keys()
    for name, value, part in (
        ("Authorization", "x", "cannot have the header 'Authorization'"),
        ("x-api-key", "x", "cannot have the header"),
        ("Host", "x", "cannot have the header"),
        ("X Run", "x", "cannot have the header"),
        ("X-Run", "a\r\nHost: b", "no text of printable"),
        ("X-Run", 7, "no text of printable"),
        ("X-Run", "sk-proj12345678", "looks like a key"),
    ):
        with pytest.raises(SettingsError, match=part) as error:
            JudgeConfig(**server, judge_headers={name: value})
        assert "proj" not in str(error.value) and "\n" not in str(error.value)
