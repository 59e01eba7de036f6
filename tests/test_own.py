"""What a recipe may name by its dotted path: a judge and further reward functions."""

import json
import math
import re
from dataclasses import dataclass

import pytest
import torch
from helpers.scripted import config
from trl import GRPOTrainer

from rankbuffer_trl.errors import NotFiniteError, SettingsError
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.training._config import RankBufferConfig
from rankbuffer_trl.training._plan import RunPlan
from rankbuffer_trl.training._reward_functions import numbered
from rankbuffer_trl.training._scorer import open_scorer

MADE = []


@dataclass
class Own(RubricJudge):
    """A judge with arguments, which notes that it was made."""

    word: str
    count: int = 1

    def __post_init__(self):
        MADE.append(self)


def shorter(completions, **kwargs) -> list[float]:
    return [-float(len(completion[0]["content"])) for completion in completions]


OWN, SHORTER, STARTED = f"{__name__}.Own", f"{__name__}.shorter", 3  # the last is not a function
PUNISH, UNKNOWN = "trl.rewards.get_soft_overlong_punishment", {"function": "a.b", "wait": 1}


def test_judge_client_is_made_with_its_arguments_when_it_is_needed():
    MADE.clear()
    settings = JudgeConfig(judge_client=OWN, judge_client_args='{"word": "yes"}', judge_max_attempts=2)
    assert MADE == [], "a check of the settings makes no client"
    judge = settings.judge()
    assert [judge.client] == MADE and (judge.client.word, judge.client.count) == ("yes", 1)
    assert (judge.max_attempts, judge.guard) == (2, True)


def test_judge_client_that_cannot_be_made_is_named_at_once():
    word, server = {"word": "x"}, {"judge_url": ["http://a/v1"], "judge_model": "m"}
    for path, arguments, more, message in (
        ("Own", None, {}, "there is no judge_client 'Own' (it is not a dotted path)"),
        ("own.no.file", None, {}, "(No module named 'own')"),
        (f"{__name__}.Other", None, {}, f"({__name__} has nothing of that name)"),
        ("helpers.judges.Mute", None, {}, "it must be a dataclass with `name`, `complete` and `close`"),
        (f"{__name__}.config", None, {}, "it must be a dataclass"),
        (OWN, None, {}, f"judge_client_args: {OWN} needs a value for 'word'"),
        (OWN, {"word": 3}, {}, "needs a text for 'word', got 3"),
        (OWN, {"words": "x"}, {}, "no argument 'words' (did you mean word?); it has word, count"),
        (OWN, "{", {}, "judge_client_args is not JSON"),
        (None, word, {}, "judge_client_args is set, but judge_client is not"),
        (OWN, word, server, "judge_client and judge_url are both set"),
    ):
        with pytest.raises(SettingsError) as error:
            JudgeConfig(judge_client=path, judge_client_args=arguments, **more)
        assert message in str(error.value), path


def test_open_scorer_takes_a_judge_that_asks_as_the_settings_say(tmp_path):
    for guard in (True, False):
        args = config(tmp_path, judge_guard=guard)
        open_scorer(args, Judge(RubricJudge(), guard=guard)).close()
        with pytest.raises(SettingsError, match=f"made with guard={not guard}, but judge_guard is {guard}"):
            open_scorer(args, Judge(RubricJudge(), guard=not guard))
    assert Judge(RubricJudge()).guard is JudgeConfig().judge_guard is True


def test_reward_functions_of_a_recipe_stand_before_those_of_the_code(training):
    named = [{"function": SHORTER, "weight": 0.01}, {"function": "trl.rewards.think_format_reward"}]
    named.append({"function": SHORTER, "weight": 0.02})

    def last(completions, **kwargs):
        return [0.0] * len(completions)

    trainer = training(format_weight=0.3, reward_functions=json.dumps(named), reward_funcs=last)
    names = ["rank_reward", "format_reward", "shorter", "think_format_reward", "shorter_2", "last"]
    assert trainer.reward_func_names == names, "TRL logs by name"
    assert trainer.reward_weights.tolist() == pytest.approx([1, 0.3, 0.01, 1, 0.02, 1])


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 1e39])
def test_a_reward_that_is_no_number_leaves_its_step_and_none_leaves_a_rollout_out(
    tmp_path, training, rows, caplog, monkeypatch, value
):
    async def later(completions, split, trainer_state, **kwargs):
        odd = {"train": value if trainer_state.global_step == 2 else None, "eval": value}[split[0]]
        return [odd if i == 3 else 0.0 for i in range(len(completions))]

    evaluation = dict(eval_strategy="steps", eval_steps=1, eval_dataset=rows.select([0, 1]))
    trainer = training(max_steps=4, reward_funcs=later, **evaluation)
    with pytest.raises(NotFiniteError, match=r"function later gave (inf or NaN|-inf) for rollout 3: return"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    logged = [log["eval_rewards/later/mean"] for log in trainer.state.log_history if "eval_reward" in log]
    assert logged == [0, 0] and caplog.text.count("for rollout 3") == 1, "an evaluation goes on without it"
    trainer._is_model[2] = True  # as if it were a reward model, which has no `None`
    with pytest.raises(NotFiniteError, match="gave nan for rollout 0"):
        monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda *_: torch.tensor([[0.0, 0.0, math.nan]]))
        trainer._calculate_rewards([{}] * 24, [], [], [])
    trainer.reward_weights[2] = 0  # what is only logged ends no run
    assert trainer._calculate_rewards([{}] * 24, [], [], [])[0, 2].isnan()


def test_a_reward_model_of_trl_is_named_by_a_text(training, monkeypatch):
    def load(name, **kwargs):
        raise LookupError(name)

    monkeypatch.setattr("trl.trainer.grpo_trainer.AutoModelForSequenceClassification.from_pretrained", load)
    with pytest.raises(LookupError, match="my-org/model"):
        training(reward_funcs="my-org/model")


def test_numbered_makes_names_that_all_differ():
    for names, told in (("aba", ["a", "b", "a_2"]), (["a", "a_2", "a", "a_2"], ["a", "a_2", "a_3", "a_2_2"])):
        assert numbered(names) == told


def test_reward_functions_that_cannot_be_loaded_are_named_at_once():
    for named, message in (
        ("[{", "reward_functions is not JSON"),
        ({"function": "a.b"}, "reward_functions must be a list"),
        (["a.b"], "an item of reward_functions must have function, weight and args"),
        *(([each], "an item of reward_functions must have function") for each in ({"weight": 1}, UNKNOWN)),
        ([{"function": "no_such.thing"}], "there is no no_such.thing (No module named 'no_such')"),
        ([{"function": "trl.rewards.thing"}], "there is no trl.rewards.thing (trl.rewards has nothing of that name)"),
        ([{"function": 3}], "there is no 3 (it is not a dotted path)"),
        ([{"function": f"{__name__}.STARTED"}], "is not a function"),
        *(([{"function": SHORTER, "weight": w}], f"a finite number, got {w!r}") for w in (float("nan"), "1")),
        ([{"function": PUNISH, "args": {"max_completion_len": 9}}], "missing a required argument: 'soft_punish_ca"),
        *(([{"function": f, "args": a}], "does not take these args") for f, a in ((SHORTER, 3), ("builtins.min", {}))),
    ):
        with pytest.raises(SettingsError) as error:
            RankBufferConfig("out", use_cpu=True, bf16=False, report_to="none", reward_functions=named)
        assert message in str(error.value), named


def short(completions) -> list[float]:
    return [0.0] * len(completions)


def test_reward_functions_that_cannot_take_what_they_are_passed_are_named_at_once(training, rows, tmp_path):
    for path, message in (
        (f"{__name__}.short", "short does not take what TRL passes (got an unexpected keyword argument 'prompts')"),
        (PUNISH, "get_soft_overlong_punishment does not take what TRL passes (missing a required argument: 'max_com"),
        ("trl.rewards.accuracy_reward", "(missing a required argument: 'solution')"),
    ):
        with pytest.raises(SettingsError, match=re.escape(message)):
            training(reward_functions=[{"function": path}])
    training(reward_functions=[{"function": PUNISH, "args": {"max_completion_len": 9, "soft_punish_cache": 1}}])
    solved = rows.add_column("solution", ["x"] * len(rows))
    args = config(tmp_path, reward_functions=[{"function": "trl.rewards.accuracy_reward"}])
    RunPlan.of(args, solved, solved)
    with pytest.raises(SettingsError, match="further columns of the data set to evaluate on"):
        RunPlan.of(args, solved, rows)
