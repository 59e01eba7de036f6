"""A run of the real trainer with a judge on a real server, from the policy's samples to buffers and ledger."""

from pathlib import Path

from helpers.scripted import config
from transformers import TrainerCallback

from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training._trainer import RankBufferTrainer


class AtStart(TrainerCallback):
    """Reads the server's counters when training starts, which is after the first question."""

    def __init__(self, server):
        self.server = server

    def on_train_begin(self, *args, **kwargs):
        self.counters = self.server.counters()


def test_two_steps_of_grpo(server, tiny_policy, rows, tmp_path, note):
    start = AtStart(server)
    args = config(tmp_path, max_steps=2, judge_url=server.url, judge_model=server.model, judge_decoding="regex")
    trainer = RankBufferTrainer(tiny_policy, args, rows, callbacks=[start])
    try:
        trainer.train()
    finally:
        trainer.close()
    store = BufferStore(Path(tmp_path, LIVE_STORE))
    totals = store.totals()
    visited = [id for (id,) in store.rows("SELECT query_id FROM groups")]
    buffers = [store.load(id) for id in visited]
    outcomes = [outcome for (outcome,) in store.rows("SELECT outcome FROM calls")]
    store.close()

    assert len(visited) == len(set(visited)) == 6
    assert all(buffer.visits == 1 and len(buffer.anchors) >= 4 for buffer in buffers)
    assert set(outcomes) == {"parsed"}
    assert totals.calls >= 40
    added = server.since(start.counters, totals.calls)
    tokens = (totals.prompt_tokens, totals.cached_tokens, totals.completion_tokens)
    assert tokens == (added.prompt, added.cached, added.completion)
    note(f"2 steps of GRPO: {totals.calls} judgments, {totals.tokens:,} judge tokens, all parsed at once")
