"""A foreign DeepSpeed or FSDP checkpoint executes code when it is loaded: refused unless the user trusts it."""

import shutil

import pytest
from helpers.scripted import config
from huggingface_hub._local_folder import get_local_download_paths

from rankbuffer_trl.store import StoreError
from rankbuffer_trl.training.checkpoint import check_trusted
from rankbuffer_trl.training.trainer import RankBufferTrainer


def make(path, deepspeed=True):
    """What counts in a checkpoint here: DeepSpeed's folder, or plain files."""
    (path / "global_step2" if deepspeed else path / "rankbuffer").mkdir(parents=True)
    (path / "optimizer.pt").touch()
    return path


def refused(checkpoint, output_dir, trusted=False) -> bool:
    try:
        check_trusted(checkpoint, output_dir, trusted)
    except StoreError as error:
        assert str(checkpoint) in str(error) and "set trust_checkpoint to true" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("place", "elsewhere"),
    [
        ("run/checkpoint-2", False),
        ("run/_from_hub/last-checkpoint", True),
        ("run/_from_hub/checkpoint-2", True),
        ("run/last-checkpoint", True),
        ("run/checkpoint-2/checkpoint-2", True),
        ("run/checkpoint-", True),
        ("other/checkpoint-2", True),
        ("run-2/checkpoint-2", True),
    ],
)
def test_only_a_checkpoint_of_this_run_may_be_executed(tmp_path, place, elsewhere):
    checkpoint, run = make(tmp_path / place), tmp_path / "run"
    assert refused(checkpoint, run) == elsewhere
    assert not refused(checkpoint, run, trusted=True)
    plain = make(tmp_path / "plain" / place, deepspeed=False)
    assert not refused(plain, run)


def test_no_path_hides_where_a_checkpoint_is_from(tmp_path, monkeypatch):
    foreign, run = make(tmp_path / "other" / "checkpoint-2"), tmp_path / "run"
    run.mkdir()
    (run / "checkpoint-2").symlink_to(foreign)
    assert refused(run / "checkpoint-2", run)
    assert refused(run / ".." / "other" / "checkpoint-2", run)
    own = make(run / "checkpoint-4")
    monkeypatch.chdir(run)
    for name in ("checkpoint-4", "../run/checkpoint-4"):
        assert not refused(own.parent / name, run) and not refused(type(own)(name), run)


def test_a_download_into_the_runs_folder_is_from_elsewhere(tmp_path):
    checkpoint = make(tmp_path / "checkpoint-2")
    get_local_download_paths(tmp_path, "checkpoint-4/latest")
    assert not refused(checkpoint, tmp_path)
    get_local_download_paths(tmp_path, "checkpoint-2/global_step2/mp_rank_00_model_states.pt")
    assert refused(checkpoint, tmp_path)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_download_is_noticed_whichever_folder_it_was_told(tmp_path, depth):
    """`hf download --local-dir` got the checkpoint itself, the run's folder, or one above."""
    run = tmp_path / "runs" / "mine"
    checkpoint = make(run / "checkpoint-2")
    told = [checkpoint, *checkpoint.parents][depth]
    get_local_download_paths(told, str((checkpoint / "global_step2" / "a.pt").relative_to(told)))
    assert refused(checkpoint, run)
    assert not refused(make(run / "checkpoint-3"), run)


def test_an_fsdp_checkpoint_is_executed_too(tmp_path):
    foreign, own = (make(tmp_path / name / "checkpoint-2", deepspeed=False) for name in ("other", "run"))
    for checkpoint in (foreign, own):
        (checkpoint / "optimizer_0").mkdir()
        (checkpoint / "optimizer_0" / ".metadata").touch()
    assert refused(foreign, tmp_path / "run")
    assert not refused(own, tmp_path / "run")


@pytest.mark.slow
def test_a_run_asks_before_anything_of_the_checkpoint_is_loaded(tmp_path, tiny_policy, rows):
    settings = dict(save_strategy="steps", save_steps=1)
    trainer = RankBufferTrainer(tiny_policy, config(tmp_path / "a", max_steps=1, **settings), rows)
    trainer.train()
    trainer.close()
    foreign = tmp_path / "b" / "_from_hub" / "last-checkpoint"
    shutil.copytree(tmp_path / "a" / "checkpoint-1", foreign)
    (foreign / "global_step1").mkdir()
    for trust in (False, True):
        args = config(tmp_path / "b", max_steps=2, trust_checkpoint=trust, **settings)
        trainer = RankBufferTrainer(tiny_policy, args, rows)
        if trust:
            trainer.train(resume_from_checkpoint=str(foreign))
            assert trainer.state.global_step == 2
        else:
            with pytest.raises(StoreError, match=r"did not write.*trust_checkpoint"):
                trainer.train(resume_from_checkpoint=str(foreign))
            assert trainer.rank_reward.scorer.store.last_step() is None
        trainer.close()
