"""Stopped anywhere and resumed, a run ends as if it had not: buffers, history, ledger and weights, bit for bit."""

import json
import shutil
from itertools import pairwise

import pytest
from safetensors.torch import load_file
from scripted import config, contents
from transformers import TrainerCallback

from rankbuffer_trl.checkpoint import LIVE_STORE, SNAPSHOT
from rankbuffer_trl.sampler import EpochSampler
from rankbuffer_trl.store import BufferStore, StoreError
from rankbuffer_trl.trainer import RankBufferTrainer

EPOCHS, STEPS_PER_EPOCH = 3, 4  # 12 queries, 3 a step


def train(output_dir, policy, rows, resume=None, callback=None, eval_rows=None, **overrides):
    """Real sampling, a checkpoint at every step. Returns everything a rerun must reproduce."""
    settings = config(output_dir, num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1, **overrides)
    trainer = RankBufferTrainer(policy, settings, rows, eval_rows, callbacks=[callback] if callback else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
    finally:
        trainer.close()
    return contents(output_dir / LIVE_STORE), load_file(output_dir / "model.safetensors")


def same(run, other):
    """Whether two runs ended alike."""
    weights, others = run[1], other[1]
    return run[0] == other[0] and all((weights[name] == others[name]).all() for name in weights)


class InterruptAt(TrainerCallback):
    """Ctrl-C after the optimizer step with this number, once it is done but before it is saved."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_policy, howto):
    """The run that nobody stopped."""
    from datasets import Dataset

    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, train(output_dir, tiny_policy, Dataset.from_list(howto[:12]))


@pytest.mark.parametrize("step", [1, 4, 6, 11], ids=lambda step: f"epoch{step // STEPS_PER_EPOCH}-step{step}")
def test_resumed_from_any_checkpoint_the_run_ends_alike(tmp_path, tiny_policy, rows, whole, step):
    output_dir, uninterrupted = whole
    shutil.copytree(output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    assert same(train(tmp_path, tiny_policy, rows, resume=str(tmp_path / f"checkpoint-{step}")), uninterrupted)


@pytest.mark.parametrize("step", [2, 7])
def test_interrupted_and_resumed_the_run_ends_alike(tmp_path, tiny_policy, rows, whole, step):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, tiny_policy, rows, callback=InterruptAt(step))
    store = BufferStore(tmp_path / LIVE_STORE)
    assert store.last_step() == step - 1, "what was judged before the interrupt is in the live store"
    store.close()
    assert same(train(tmp_path, tiny_policy, rows, resume=True), whole[1])


def test_resume_takes_the_newest_whole_checkpoint_and_skips_a_torn_one(tmp_path, tiny_policy, rows, whole):
    output_dir, uninterrupted = whole
    for step in (4, 5):
        shutil.copytree(output_dir / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-5" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-9").mkdir()
    assert same(train(tmp_path, tiny_policy, rows, resume=True), uninterrupted)


def test_evaluation_in_between_changes_neither_buffers_nor_resume(tmp_path, tiny_policy, rows):
    evaluation = dict(
        eval_rows=rows.select(range(2)), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8
    )
    run = train(tmp_path / "a", tiny_policy, rows, **evaluation)
    shutil.copytree(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")
    assert same(train(tmp_path / "b", tiny_policy, rows, resume=True, **evaluation), run)
    phases = {row[1] for row in run[0]["calls"]}
    assert phases == {"train", "eval"}


def test_a_checkpoint_without_its_buffers_is_refused(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / SNAPSHOT).unlink()
    with pytest.raises(StoreError, match=r"checkpoint-4 is not a whole checkpoint"):
        train(tmp_path, tiny_policy, rows, resume=str(tmp_path / "checkpoint-4"))
    with pytest.raises(StoreError, match="no whole checkpoint"):
        train(tmp_path, tiny_policy, rows, resume=True)


def test_a_policy_with_another_steps_buffers_is_refused(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    shutil.copy(whole[0] / "checkpoint-8" / SNAPSHOT, tmp_path / "checkpoint-4" / SNAPSHOT)
    with pytest.raises(StoreError, match="policy is at step 4, its buffers at 7"):
        train(tmp_path, tiny_policy, rows, resume=str(tmp_path / "checkpoint-4"))


def test_a_new_run_in_an_old_folder_keeps_the_old_buffers_aside(tmp_path, tiny_policy, rows, whole):
    live = tmp_path / LIVE_STORE
    live.parent.mkdir(parents=True)
    shutil.copy(whole[0] / LIVE_STORE, live)
    assert same(train(tmp_path, tiny_policy, rows), whole[1])
    assert contents(live.with_stem("live-1")) == whole[1][0]


def test_resuming_with_data_in_another_order_is_noticed(tmp_path, tiny_policy, rows, whole):
    shutil.copytree(whole[0] / "checkpoint-6", tmp_path / "checkpoint-6")
    with pytest.raises(RuntimeError, match=r"already visited .* data order"):
        train(tmp_path, tiny_policy, rows.select(range(11, -1, -1)), resume=True)


def test_the_sampler_gives_the_stock_order_and_any_epoch_on_its_own(rows):
    from trl.trainer.utils import RepeatSampler

    def stock():
        return RepeatSampler(rows, mini_repeat_count=2, batch_size=5, repeat_count=2, shuffle=True, seed=7)

    uninterrupted = stock()
    orders = [list(uninterrupted) for _ in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    for epoch, order in enumerate(orders):
        assert list(EpochSampler(stock(), lambda epoch=epoch: epoch)) == order


def test_history_tells_what_each_group_did_to_its_buffer(whole):
    table = whole[1][0]
    versions = {
        (query_id, step): [a[0] for a in json.loads(anchors)] for query_id, step, anchors, *_ in table["buffers"]
    }
    steps = {}
    for query_id, step, *_ in table["groups"]:
        steps.setdefault(query_id, []).append(step)
    history = {(row[0], row[1]): row for row in table["groups"]}
    for query_id, visited in steps.items():
        for earlier, later in pairwise(visited):
            _, _, _, k, _, _, _, added, pruned = history[query_id, later]
            before, after = versions[query_id, earlier], versions[query_id, later]
            assert k == len(before)
            assert {id for id, _ in json.loads(added)} == set(after) - set(before)
            assert {id for id, _ in json.loads(pruned)} == set(before) - set(after)
