"""What a recipe may name by its dotted path: a judge and further reward functions."""

import json
from dataclasses import dataclass

import pytest
from helpers.scripted import ScriptedTrainer, config

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Judge, RubricJudge
from rankbuffer_trl.judge.config import JudgeConfig
from rankbuffer_trl.rewards.functions import load_functions
from rankbuffer_trl.training.config import RankBufferConfig
from rankbuffer_trl.training.trainer import open_scorer

MADE = []


@dataclass
class Own(RubricJudge):
    """A judge with arguments, which notes that it was made."""

    word: str
    count: int = 1

    def __post_init__(self):
        MADE.append(self)


@dataclass
class Mute:
    """No judge: it cannot be closed."""

    name = "mute"

    async def complete(self, messages, **kwargs):
        raise NotImplementedError


PATH = f"{__name__}.Own"
STARTED = 3  # not a function


def test_a_judge_is_made_with_its_arguments_when_it_is_needed(tmp_path):
    MADE.clear()
    settings = JudgeConfig(judge_client=PATH, judge_client_args='{"word": "yes"}', judge_max_attempts=2)
    assert MADE == [], "a check of the settings makes no client"
    judge = settings.judge()
    assert [judge.client] == MADE and (judge.client.word, judge.client.count) == ("yes", 1)
    assert (judge.max_attempts, judge.guard) == (2, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge_client": "Own"}, "there is no judge_client 'Own' (it is not a dotted path)"),
        ({"judge_client": "own.no.file"}, "(No module named 'own')"),
        ({"judge_client": f"{__name__}.Other"}, f"({__name__} has nothing of that name)"),
        ({"judge_client": f"{__name__}.Mute"}, "it must be a dataclass with `name`, `complete` and `close`"),
        ({"judge_client": f"{__name__}.config"}, "it must be a dataclass"),
        ({"judge_client": PATH}, f"judge_client_args: {PATH} needs a value for 'word'"),
        ({"judge_client": PATH, "judge_client_args": {"word": 3}}, "needs a text for 'word', got 3"),
        ({"judge_client": PATH, "judge_client_args": {"words": "x"}}, "no argument 'words'; it has word, count"),
        ({"judge_client": PATH, "judge_client_args": "{"}, "judge_client_args is not JSON"),
        ({"judge_client_args": {"word": "x"}}, "judge_client_args is set, but judge_client is not"),
        (
            {
                "judge_client": PATH,
                "judge_client_args": {"word": "x"},
                "judge_url": ["http://a/v1"],
                "judge_model": "m",
            },
            "judge_client and judge_url are both set",
        ),
    ],
)
def test_a_judge_that_cannot_be_made_is_named_at_once(settings, message):
    with pytest.raises(SettingsError) as error:
        JudgeConfig(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize("guard", [True, False])
def test_a_judge_that_is_given_asks_as_the_settings_say(tmp_path, guard):
    args = config(tmp_path, judge_guard=guard)
    open_scorer(args, Judge(RubricJudge(), guard=guard)).close()
    with pytest.raises(SettingsError, match=f"made with guard={not guard}, but judge_guard is {guard}"):
        open_scorer(args, Judge(RubricJudge(), guard=not guard))
    assert Judge(RubricJudge()).guard is JudgeConfig().judge_guard is True


def shorter(completions, **kwargs) -> list[float]:
    return [-float(len(completion[0]["content"])) for completion in completions]


def test_rewards_of_a_recipe_stand_before_those_of_the_code(tmp_path, tiny_policy, rows):
    named = [{"function": f"{__name__}.shorter", "weight": 0.01}, {"function": "trl.rewards.think_format_reward"}]

    def last(completions, **kwargs):
        return [0.0] * len(completions)

    args = config(tmp_path, max_steps=1, format_weight=0.3, reward_functions=json.dumps(named))
    trainer = ScriptedTrainer(tiny_policy, args, rows, reward_funcs=[last])
    assert trainer.reward_func_names == ["rank_reward", "format_reward", "shorter", "think_format_reward", "last"]
    assert trainer.reward_weights.tolist() == pytest.approx([1, 0.3, 0.01, 1, 1])
    trainer.close()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("[{", "reward_functions is not JSON"),
        ({"function": "a.b"}, "reward_functions must be a list"),
        (["a.b"], "an item of reward_functions must have function, weight and args"),
        ([{"weight": 1}], "an item of reward_functions must have function"),
        ([{"function": "a.b", "wait": 1}], "an item of reward_functions must have function"),
        ([{"function": "no_such.thing"}], "there is no no_such.thing (No module named 'no_such')"),
        ([{"function": "trl.rewards.thing"}], "there is no trl.rewards.thing (trl.rewards has nothing of that name)"),
        ([{"function": 3}], "there is no 3 (it is not a dotted path)"),
        ([{"function": f"{__name__}.STARTED"}], "is not a function"),
        ([{"function": f"{__name__}.shorter", "weight": float("nan")}], "must be a finite number, got nan"),
        ([{"function": f"{__name__}.shorter", "weight": "1"}], "must be a finite number, got '1'"),
        (
            [{"function": "trl.rewards.get_soft_overlong_punishment", "args": {"max_completion_len": 9}}],
            "does not take these args: missing a required argument: 'soft_punish_cache'",
        ),
        ([{"function": f"{__name__}.shorter", "args": 3}], "does not take these args"),
    ],
)
def test_rewards_that_cannot_be_loaded_are_named_at_once(tmp_path, named, message):
    with pytest.raises(SettingsError) as error:
        RankBufferConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", reward_functions=named)
    assert message in str(error.value)


def test_trl_punishes_long_completions_as_the_page_says():
    (punish,), (weight,) = load_functions(
        [
            {
                "function": "trl.rewards.get_soft_overlong_punishment",
                "args": {"max_completion_len": 4096, "soft_punish_cache": 512},
                "weight": 0.5,
            }
        ]
    )
    lengths = (1, 3584, 3840, 4096)
    assert punish(completion_ids=[[0] * n for n in lengths]) == [0, 0, -0.5, -1] and weight == 0.5
