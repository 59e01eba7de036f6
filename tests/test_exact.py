"""The resumable trainer alone: without a judge, ranks or our settings, with a state of a few lines."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from safetensors.torch import load_file
from trl import GRPOConfig

from rankbuffer_trl.exact.manifest import FOLDER, CheckpointError
from rankbuffer_trl.exact.trainer import ResumableTrainer


class Rewards:
    """A state that is one list: the rewards of all rollouts so far, by step."""

    file, steps_per_epoch = f"{FOLDER}/rewards.json", 3

    def __init__(self, data: str = "three prompts"):
        self.data, self.rows = data, []

    def ends_generation(self, step: int) -> bool:
        return True

    def identity(self) -> dict:
        return {"data": self.data}

    def differences(self, saved: dict) -> list[str]:
        return [] if saved["data"] == self.data else [f"data: {saved['data']}"]

    def facts(self) -> dict:
        return {"for": "people"}

    def check_start(self, saved: Path | None, step: int) -> None:
        assert (saved is None) == (step == 0)

    def start(self, saved: Path | None) -> None:
        self.rows = json.loads((saved / "rewards.json").read_text()) if saved else []

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards.json").write_text(json.dumps(self.rows))

    def rewind(self, step: int) -> None:
        self.rows = self.rows[:step]

    def over_budget(self) -> str | None:
        return None

    def wake(self) -> None:
        pass


def train(folder: Path, policy: str, state: Rewards, ends_at: int | None = None, resume: bool = False) -> Rewards:
    def length(completions, trainer_state, **kwargs):
        if trainer_state.global_step == ends_at:
            raise KeyboardInterrupt
        state.rows.append([len(text) for text in completions])
        return [float(len(text)) for text in completions]

    args = GRPOConfig(
        str(folder), num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, save_steps=1,
        max_steps=5, max_completion_length=8, report_to="none", use_cpu=True, bf16=False, seed=4, learning_rate=1e-3,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"Name {n} kinds of tea."} for n in range(3)])
    trainer = ResumableTrainer(policy, reward_funcs=[length], args=args, train_dataset=rows, run_state=state)
    trainer.train(resume_from_checkpoint=resume)
    return state


def test_a_run_that_ended_anywhere_goes_on_as_if_it_had_not(tmp_path, tiny_policy):
    whole = train(tmp_path / "whole", tiny_policy, Rewards())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", tiny_policy, Rewards(), ends_at=4)
    with pytest.raises(CheckpointError, match="belongs to another run:\n  data: three prompts"):
        train(tmp_path / "cut", tiny_policy, Rewards("others"), resume=True)
    resumed = train(tmp_path / "cut", tiny_policy, Rewards(), resume=True)
    assert len(whole.rows) == 5 and resumed.rows == whole.rows
    ends = [load_file(tmp_path / name / "checkpoint-5" / "model.safetensors") for name in ("whole", "cut")]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    told = json.loads((tmp_path / "cut" / "checkpoint-5" / FOLDER / "run.json").read_text())
    assert told["data"] == "three prompts" and told["for"] == "people" and told["step"] == 5
