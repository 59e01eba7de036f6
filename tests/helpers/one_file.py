"""The example in one file as tests run it: a judge that answers as a test decides, and known rollouts."""

import json
import random
import sys
from functools import cached_property
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from openai import OpenAIError
from trl import GRPOConfig

from helpers.scripted import ScriptedTrainer, config
from rankbuffer_trl.data._queries import QueryTable
from rankbuffer_trl.judge import TransportError
from rankbuffer_trl.judge._rubric_judge import judge as by_rubrics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import rankbuffer_in_one_file as one

NO_VERDICTS = ("", "I do not know.", '{"position": 99, "order": [0, 0]}', '{"position": true, "order": [true, 0, 1]}')
SAME = (  # the settings that a run of the package and one of the example share
    "use_cpu bf16 report_to num_generations per_device_train_batch_size max_completion_length num_train_epochs"
    " learning_rate logging_steps disable_tqdm seed"
).split()


def unreliable(answer, case):
    """Return a judge that answers as `answer` does, but fails on some questions of a case, for good or at first.

    A failure is a broken connection or an answer that is no verdict. It depends on the question alone.
    """
    seed, share = case

    def respond(messages):
        prompt = messages[0]["content"]
        draw = random.Random(f"{seed} {prompt}")
        fails, failure = draw.random() < share, draw.choice([TransportError("refused"), *NO_VERDICTS])
        mended = draw.random() < 0.5 and len(messages) > 1
        return failure if fails and not mended else answer(prompt)

    return respond


class ScriptedJudge(one.Judge):
    def __init__(self, answer=None):
        super().__init__("http://127.0.0.1:9/v1", "scripted")
        self.answer, self.seen = answer, []

    async def complete(self, messages):
        self.seen.append(messages)
        answer = self.answer(messages)
        if isinstance(answer, Exception):
            raise OpenAIError(str(answer))
        return answer


class ScriptedOne(one.RankBufferTrainer):
    """The trainer of the example with the rollouts of `ScriptedTrainer`. It writes the same `rewards.json`."""

    _generate_single_turn = ScriptedTrainer._generate_single_turn
    script = ScriptedTrainer.script

    @cached_property
    def train_queries(self) -> QueryTable:
        return QueryTable(Dataset.from_list(list(self.queries.values())), anchors_needed=2)

    def _calculate_rewards(self, *args):
        rewards = super()._calculate_rewards(*args)
        if self.accelerator.is_main_process:
            with Path(self.args.output_dir, "rewards.json").open("a") as file:
                file.write(json.dumps([self.state.global_step, rewards[:, 0].tolist()]) + "\n")
        return rewards


def trainer(
    output_dir: Path, policy: str, data: str | Path, case=(0, 0), max_failures: float = 1.0, **overrides
) -> ScriptedOne:
    """Return a trainer of the example whose judge fails as `unreliable` says, with the settings of `config`."""
    theirs = config(output_dir, **overrides)
    args = GRPOConfig(
        str(output_dir),
        reward_weights=[1.0, theirs.format_weight],
        **{name: getattr(theirs, name) for name in (*SAME, *overrides)},
    )
    settings = one.Settings("nowhere", "scripted", max_failures=max_failures)
    rows = load_dataset("json", data_files=str(data), split="train")
    return ScriptedOne(policy, args, settings, rows, ScriptedJudge(unreliable(by_rubrics, case)))


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])
