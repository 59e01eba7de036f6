"""What production watches: the log of steps as a file, the exit code, the judge's headers."""

import json
import pickle

import pytest
from conftest import ask_all
from helpers.servers import GOOD, completion

from rankbuffer_tools.train import ending
from rankbuffer_trl.checkpointing._checkpoint import describe
from rankbuffer_trl.checkpointing.manifest import checkpoints
from rankbuffer_trl.errors import RankBufferError, SettingsError
from rankbuffer_trl.judge import JudgeError
from rankbuffer_trl.judge._questions import insertion_question
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.monitoring._step_log import METRICS_FILE, StepLog, step_of
from rankbuffer_trl.training._rollouts import RolloutError


def steps(folder) -> list[int]:
    """The steps of the lines of a run's log."""
    return [json.loads(line)["step"] for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_a_run_has_one_line_a_step_also_after_a_resume_and_a_new_start(tmp_path, training):
    log = tmp_path / METRICS_FILE
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
    assert steps(tmp_path) == [1] and step_of('{"step": 1e400}') == -1


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

    monkeypatch.setattr("rankbuffer_trl.monitoring._step_log.open", Full, raising=False)
    trainer = training(max_steps=1, logging_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1 and (tmp_path / METRICS_FILE).read_bytes() == b""
    assert "metrics.jsonl only informs and could not be made" in caplog.text
    monkeypatch.undo()
    trainer.state.global_step = 2
    log = StepLog(str(tmp_path))
    log.on_log(trainer.args, trainer.state, trainer.control, {"loss": float("nan"), "word": "x"})
    assert json.loads((tmp_path / METRICS_FILE).read_text()).items() >= {"step": 2, "loss": None, "word": "x"}.items()
    trainer.state.is_world_process_zero = False
    log.on_log(trainer.args, trainer.state, trainer.control, {"loss": 1.0})
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1, "another process writes nothing"


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
    args = training(judge_headers={"X-Run": "a"}).args
    kept = pickle.loads(pickle.dumps(args))
    assert (kept.judge_headers, args.judge_headers) == (None, {"X-Run": "a"})
    assert not kept.endpoint.headers and args.endpoint.headers
    assert "judge_headers" not in describe({}, 0, args)["config"]
    for name, value, part in (
        ("Authorization", "x", "cannot have the header 'Authorization'"),
        *((name, "x", "cannot have the header") for name in ("x-api-key", "Host", "X Run")),
        *(("X-Run", value, "no text of printable") for value in ("a\r\nHost: b", 7)),
        ("X-Run", "sk-proj12345678", "looks like a key"),
    ):
        with pytest.raises(SettingsError, match=part) as error:
            JudgeConfig(**server, judge_headers={name: value})
        assert "proj" not in str(error.value) and "\n" not in str(error.value)
