"""The resumable trainer alone: without a judge, ranks or our settings, with a state of a few lines."""

import json
import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from trl import GRPOConfig

from rankbuffer_trl.checkpointing import _distributed as distributed
from rankbuffer_trl.checkpointing._distributed import StepLeft, for_others, leaves_step
from rankbuffer_trl.checkpointing._trainer import ResumableTrainer
from rankbuffer_trl.checkpointing.manifest import FOLDER, CheckpointError
from rankbuffer_trl.errors import NotFiniteError


class Rewards:
    """A state that is one list: the rewards of all rollouts so far, by step."""

    file, steps_per_epoch = f"{FOLDER}/rewards.json", 3

    def __init__(self, data: str = "three prompts"):
        self.data, self.rows = data, []

    def ends_generation(self, step: int) -> bool:
        return True

    def differences(self, saved: dict) -> list[str]:
        return [] if saved["data"] == self.data else [f"data: {saved['data']}"]

    def facts(self) -> dict:
        return {"data": self.data, "for": "people"}

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


class Saves(TrainerCallback):
    """A callback that notes what is saved."""

    def __init__(self):
        self.steps: list[int] = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


def make(
    folder: Path, policy: str, state: Rewards, ends: dict[int, type[BaseException]] | None = None, lora=None, **changes
) -> ResumableTrainer:
    """Make a trainer whose steps in `ends` end with an error, after their rewards."""

    def length(completions, trainer_state, **kwargs):
        if len(completions) == 2:  # an evaluation has six
            state.rows.append([len(text) for text in completions])
        if error := (ends or {}).get(trainer_state.global_step):
            raise error
        return [float(len(text)) for text in completions]

    values = dict(
        num_generations=2, per_device_train_batch_size=2, gradient_accumulation_steps=1, save_steps=1,
        max_steps=5, max_completion_length=8, report_to="none", use_cpu=True, bf16=False, seed=4, learning_rate=1e-3,
    )  # fmt: skip
    args = GRPOConfig(str(folder), **(values | changes))
    rows = Dataset.from_list([{"prompt": f"Name {n} kinds of tea."} for n in range(3)])
    adapter = lora and LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **lora)
    data = {"train_dataset": rows, "eval_dataset": rows if "eval_strategy" in changes else None}
    return ResumableTrainer(policy, reward_funcs=[length], args=args, run_state=state, peft_config=adapter, **data)


def train(folder: Path, policy: str, state: Rewards, ends=None, resume: bool = False, **changes) -> Rewards:
    make(folder, policy, state, ends, **changes).train(resume_from_checkpoint=resume)
    return state


def test_a_run_that_ended_anywhere_goes_on_as_if_it_had_not(tmp_path, tiny_policy):
    whole = train(tmp_path / "whole", tiny_policy, Rewards())
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", tiny_policy, Rewards(), {4: KeyboardInterrupt})
    with pytest.raises(CheckpointError, match="belongs to another run:\n  data: three prompts"):
        train(tmp_path / "cut", tiny_policy, Rewards("others"), resume=True)
    resumed = train(tmp_path / "cut", tiny_policy, Rewards(), resume=True)
    assert len(whole.rows) == 5 and resumed.rows == whole.rows
    ends = [load_file(tmp_path / name / "checkpoint-5" / "model.safetensors") for name in ("whole", "cut")]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    told = json.loads((tmp_path / "cut" / "checkpoint-5" / FOLDER / "run.json").read_text())
    assert told["data"] == "three prompts" and told["for"] == "people" and told["step"] == 5


def test_an_adapter_goes_on_with_its_own_policy_and_scale_alone(tmp_path, tiny_policy):
    folder, here, there = tmp_path / "run", tmp_path / "here" / "policy", tmp_path / "there" / "policy"
    shutil.copytree(tiny_policy, here)
    train(folder, str(here), Rewards(), lora={"r": 4}, max_steps=1)
    for policy, settings, fault in (
        (here, {"lora": {"r": 4, "lora_alpha": 32}}, "lora_alpha: 8 in the checkpoint, 32 now"),
        (here, {"lora": {"r": 4, "exclude_modules": ["q_proj"]}}, "exclude_modules: "),
        (tiny_policy, {"lora": {"r": 4}}, "base_model_name_or_path: "),
        (here, {"lora": {"r": 4}, "optim": "adafactor"}, "optim: 'adamw_torch[a-z_]*' in .*, 'adafactor' now"),
        (here, {}, r"has an adapter \(use_peft\), and this run trains all weights"),
    ):
        with pytest.raises(CheckpointError, match=fault):
            train(folder, str(policy), Rewards(), resume=True, max_steps=2, **settings)
    shutil.copytree(here, there)
    shutil.rmtree(here)
    assert len(train(folder, str(there), Rewards(), lora={"r": 4}, resume=True, max_steps=2).rows) == 2


def test_a_step_that_is_left_changes_nothing(tmp_path, tiny_policy):
    whole = train(tmp_path / "whole", tiny_policy, Rewards(), max_steps=3)
    for strategy, saved in (("steps", [1, 2]), ("no", [2])):
        saves, folder = Saves(), tmp_path / strategy
        trainer = make(folder, tiny_policy, Rewards(), {2: StepLeft}, save_strategy=strategy, max_steps=3)
        trainer.add_callback(saves)
        trainer.train()
        assert trainer.interrupted and saves.steps == saved
        files = [at / "checkpoint-2" / "trainer_state.json" for at in (folder, tmp_path / "whole")]
        assert len({json.loads(file.read_text())["num_input_tokens_seen"] for file in files}) == 1
    resumed = train(folder, tiny_policy, Rewards(), resume=True, max_steps=3)
    assert resumed.rows == whole.rows, "the rewards of the step are gone, and its random numbers are drawn again"


class ServerError(Exception):
    leaves_step = True


def test_half_a_step_of_the_optimizer_is_not_saved_as_a_whole_one(tmp_path, tiny_policy, monkeypatch):
    trainer = make(tmp_path, tiny_policy, Rewards(), save_strategy="no", max_steps=3)
    trainer.create_optimizer_and_scheduler(3)
    step, steps = trainer.optimizer.step, iter([True, True])
    monkeypatch.setattr(trainer.optimizer, "step", lambda *args, **kwargs: next(steps) and step(*args, **kwargs))
    with pytest.raises(StopIteration):
        trainer.train()
    assert trainer.state.global_step == 2 and not [*tmp_path.glob("checkpoint-*")]


def test_a_step_that_a_server_ends_costs_no_finished_step(tmp_path, tiny_policy, monkeypatch):
    whole = train(tmp_path / "whole", tiny_policy, Rewards(), max_steps=4)
    for error, saved in (ServerError, 2), (ValueError, 2), (KeyboardInterrupt, None):
        folder = tmp_path / error.__name__
        with pytest.raises(error):
            train(folder, tiny_policy, Rewards(), {2: error}, save_strategy="no", max_steps=4)
        assert [each.name for each in folder.glob("checkpoint-*")] == ([f"checkpoint-{saved}"] if saved else [])
    resumed = train(tmp_path / "ServerError", tiny_policy, Rewards(), resume=True, max_steps=4, save_strategy="no")
    assert resumed.rows == whole.rows
    assert for_others(ServerError()).leaves_step and not for_others(ValueError()).leaves_step
    monkeypatch.setattr(Rewards, "save", lambda self, folder: 1 / 0)
    with pytest.raises(ServerError):  # and not the error of the second fault
        train(tmp_path / "full", tiny_policy, Rewards(), {2: ServerError}, save_strategy="no")
    monkeypatch.setattr(Rewards, "ends_generation", lambda self, step: False)
    with pytest.raises(ServerError):
        train(tmp_path / "inside", tiny_policy, Rewards(), {2: ServerError}, save_strategy="no")
    assert not [*(tmp_path / "inside").glob("checkpoint-*")]


@pytest.mark.parametrize(("scaler", "left"), [(None, True), (torch.amp.GradScaler("cpu", enabled=False), False)])
def test_a_step_without_a_finite_gradient_is_not_taken(tmp_path, tiny_policy, scaler, left):
    trainer = make(tmp_path, tiny_policy, Rewards(), save_strategy="no", max_steps=3, scale_rewards="none")
    trainer.accelerator.scaler = scaler
    trainer.reward_funcs = [lambda trainer_state, **_: [1.0, -math.inf if trainer_state.global_step == 2 else 2.0]]
    with pytest.raises(NotFiniteError, match="the gradient of step 3") if left else nullcontext():
        trainer.train()
    weights = [weight.isfinite().all() for weight in trainer.model.parameters()]
    assert all(weights) == left == (tmp_path / "checkpoint-2").exists()


def test_steps_that_deepspeed_leaves_out_end_a_run_that_makes_no_other(tmp_path, tiny_policy, monkeypatch):
    trainer = make(tmp_path, tiny_policy, Rewards())
    trainer.is_deepspeed_enabled, skipped = True, [True]
    monkeypatch.setattr(type(trainer.accelerator), "optimizer_step_was_skipped", property(lambda _: skipped[0]))
    norm = partial(trainer._get_grad_norm, trainer.model)
    assert [norm(math.inf), norm(math.inf), norm(1.0), norm(math.inf), norm(math.inf)] == [math.inf] * 2 + [1] + [
        math.inf
    ] * 2
    with pytest.raises(NotFiniteError, match="has the norm inf, as those of the 2 steps before have"):
        norm(math.inf)
    skipped[0], trainer._left_out = False, 0
    assert {norm(math.inf) for _ in range(9)} == {math.inf}, "a step that was taken is not left"
    skipped[0], trainer.args.fp16 = True, True
    assert {norm(math.inf) for _ in range(9)} == {math.inf}, "its scaler leaves such steps out"


def test_a_checkpoint_that_leaves_out_weights_is_refused(tmp_path, tiny_policy):
    trainer = make(tmp_path, tiny_policy, Rewards())
    assert hasattr(Trainer, "_issue_warnings_after_load"), "transformers calls it by another name"

    def load(*missing: str) -> None:
        trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=missing, unexpected_keys=()))

    assert trainer.model.config.tie_word_embeddings
    load("lm_head.weight")
    load()
    with pytest.raises(CheckpointError, match=r"^1 weights of the policy were not restored, among them model\.norm"):
        load("lm_head.weight", "model.norm.weight")


class Draws(TrainerCallback):
    """A callback that draws a random number for each line of the log."""

    def on_log(self, args, state, control, **kwargs):
        torch.rand(1)


class Fails(Draws):
    """A callback that fails in the evaluation after the second step."""

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ServerError


def test_an_evaluation_that_a_server_ends_costs_no_finished_step(tmp_path, tiny_policy):
    def go(folder: str, callback: TrainerCallback, resume: bool = False) -> list:
        changes = dict(save_strategy="no", eval_strategy="steps", eval_steps=1, max_steps=3, logging_steps=1)
        trainer = make(tmp_path / folder, tiny_policy, state := Rewards(), **changes)
        trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resume)
        return state.rows

    whole = go("whole", Draws())
    with pytest.raises(ServerError):
        go("cut", Fails())
    assert [each.name for each in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    assert len(whole) == 3 and go("cut", Draws(), resume=True) == whole


def test_leaves_step_is_false_for_an_error_that_one_of_several_processes_has(monkeypatch):
    everywhere = ServerError()
    told = for_others(everywhere)
    for processes, alone in (1, True), (2, False):
        monkeypatch.setattr(distributed, "PartialState", lambda n=processes: SimpleNamespace(num_processes=n))
        errors = everywhere, told, NotFiniteError(), ServerError(), for_others(ValueError())
        assert [leaves_step(each) for each in errors] == [True, True, True, alone, False]


def test_a_second_training_knows_nothing_of_the_first_one(tmp_path, tiny_policy):
    ends: dict[int, type[BaseException]] = {}
    trainer = make(tmp_path, tiny_policy, Rewards(), ends, save_strategy="no", max_steps=1)
    trainer.train()
    ends[0] = StepLeft
    trainer.train()
    assert trainer.interrupted and not [*tmp_path.glob("checkpoint-*")], "there is nothing to save"
