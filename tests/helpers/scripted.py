"""A training run with known rollouts."""

import hashlib
import json
from pathlib import Path

from datasets import Dataset

from helpers.contents import contents
from rankbuffer_trl.data._queries import QueryTable
from rankbuffer_trl.store._places import LIVE_STORE
from rankbuffer_trl.training._config import RankBufferConfig
from rankbuffer_trl.training._trainer import RankBufferTrainer


class ScriptedTrainer(RankBufferTrainer):
    """A trainer whose rollouts are known: the text depends on the step, the query and the place in the group.

    The trainer also writes the rank rewards that TRL receives to `rewards.json`: one line per step, with the rewards
    of all processes in order.
    """

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        first = self.accelerator.process_index * len(prompt_ids)
        group = self.num_generations if self.model.training else self.num_generations_eval
        texts = [
            self.script(self.state.global_step, tuple(ids), (first + row) % group)
            for row, ids in enumerate(prompt_ids)
        ]
        ids = [self._tokenizer(text)["input_ids"] + [self._tokenizer.eos_token_id] for text in texts]
        return ids, None

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        if self.model.training and self.accelerator.is_main_process:
            with (Path(self.args.output_dir) / "rewards.json").open("a") as file:
                file.write(json.dumps([self.state.global_step, rewards[:, 0].tolist()]) + "\n")
        return rewards

    @property
    def train_queries(self) -> QueryTable:
        return self.rank_reward.queries

    def script(self, step: int, prompt: tuple[int, ...], place: int) -> str:
        question = self._tokenizer.decode(prompt).split("user\n")[1].split("<|im_end|>")[0]
        table = self.train_queries
        query = next(table[id] for id in table.ids if table[id].text == question)
        digest = hashlib.sha256(f"{step} {query.id} {place}".encode()).digest()
        if digest[0] < 16:
            return ""
        text = query.responses[digest[1] % len(query.responses)]
        return text[: len(text) // 2] if digest[0] > 220 else text


def config(output_dir: Path, **overrides) -> RankBufferConfig:
    """Return the settings of a small, silent run on the CPU."""
    values = dict(output_dir=str(output_dir), use_cpu=True, bf16=False, report_to="none", seed=3, disable_tqdm=True)
    values |= dict(num_generations=8, per_device_train_batch_size=24, max_completion_length=24, num_train_epochs=2)
    values |= dict(learning_rate=1e-3, logging_steps=1, save_strategy="no")
    return RankBufferConfig(**(values | overrides))


def run(output_dir: Path, policy: str, rows: Dataset, eval_rows: Dataset | None = None, **overrides) -> dict:
    """Train with scripted rollouts and return the contents of the store."""
    trainer = ScriptedTrainer(policy, config(output_dir, **overrides), rows, eval_rows)
    try:
        trainer.train()
        trainer.accelerator.wait_for_everyone()
    finally:
        trainer.close()
    return contents(output_dir / LIVE_STORE)
