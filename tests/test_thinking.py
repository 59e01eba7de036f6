"""Thinking mode in the real trainer: what reaches the judge, and what a rollout without an answer gets."""

import json
import re

import pytest
import trl.chat_template_utils
from conftest import scripted_judge
from helpers.scripted import ScriptedTrainer, contents
from test_format import of_trl
from transformers import AutoTokenizer

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge._rubric_judge import judge as rubric_verdict
from rankbuffer_trl.store._places import LIVE_STORE

THOUGHT = "let me see what they want to hear"
EMPTY = (2, 3, 4)
CUT_OFF = (2, 6)  # no end-of-text token
ILL_FORMED = (2, 3, 4, 5)


class ThinkingTrainer(ScriptedTrainer):
    """Eight rollouts a query: two good ones, and each way in which one can go wrong."""

    opened = False

    def _generate_single_turn(self, *args, **kwargs):
        ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [row[:-1] if i % 8 in CUT_OFF else row for i, row in enumerate(ids)], logprobs

    def script(self, step, prompt, place):
        answer = f"Answer {place} is: wait three minutes."
        texts = {
            2: f"<think>{THOUGHT}, and see again",
            3: f"<think>{THOUGHT}</think>\n",
            4: "",
            5: f"<think>{THOUGHT}</think> {THOUGHT}</think>{answer}",
            6: f"<think>{THOUGHT}</think>{answer[:-9]}",
        }
        text = texts.get(place, f"<think>\n{THOUGHT}\n</think>\n\n{answer}")
        return text.removeprefix("<think>") if self.opened else text


STEP = dict(per_device_train_batch_size=8, format_check="think")


def train(tmp_path, tiny_policy, training, template, cls=ThinkingTrainer, split=False, **settings):
    """Train for one step. Return what the judge was asked, the groups, and the log."""
    reasoned, judge = [], scripted_judge(lambda messages: rubric_verdict(messages[0]["content"]), guard=True)

    def spy(completions, **kwargs):
        reasoned.extend(bool(message.get("reasoning_content")) for [message] in completions)
        return [0.0] * len(completions)

    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = of_trl(template)
    if split:  # TRL then takes completions apart into reasoning_content and content
        tokenizer = trl.chat_template_utils.add_response_schema(tokenizer)
    given = dict(reward_funcs=[spy], judge=judge, processing_class=tokenizer)
    trainer = training(cls=cls, max_steps=1, **STEP, **given, **settings)
    trainer.opened = template == "deepseek_r1_distill"
    trainer.train()
    assert any(reasoned) == split
    seen = [messages[0]["content"] for messages in judge.client.seen]
    return seen, contents(tmp_path / LIVE_STORE)["groups"], trainer.state.log_history[0]


@pytest.mark.parametrize(("template", "split"), [("qwen3", False), ("qwen3", True), ("deepseek_r1_distill", False)])
def test_trainer_has_only_answers_judged(tmp_path, tiny_policy, training, template, split):
    seen, groups, log = train(tmp_path, tiny_policy, training, template, split=split)
    inserted = [prompt for prompt in seen[1:] if "\n\nCANDIDATE\n" in prompt]  # the first one is the preflight
    found = sorted(place for place in range(8) for prompt in inserted if f"Answer {place} is" in prompt)
    assert found == [0, 1, 5, 6, 7] and len(inserted) == 5
    assert not any(THOUGHT in prompt or "think>" in prompt for prompt in seen)
    (group,) = groups
    rewards = json.loads(group[6])
    assert [place for place, reward in enumerate(rewards) if reward == -1] == list(EMPTY)
    assert log["rewards/format_reward/mean"] == 1 - len(ILL_FORMED) / 8
    assert log["rank/empty"] == len(EMPTY) / 8
    assert log["completions/clipped_ratio"] == len(CUT_OFF) / 8


class PlainTrainer(ThinkingTrainer):
    """Writes no tags."""

    def script(self, step, prompt, place):
        return "" if place == 4 else f"Answer {place} is: wait three minutes."


@pytest.mark.parametrize("thinking", [False, True])
def test_trainer_takes_a_completion_without_tags_unless_thinking_is_on(tmp_path, tiny_policy, training, thinking):
    switch = {"enable_thinking": thinking}
    seen, groups, log = train(tmp_path, tiny_policy, training, "qwen3", PlainTrainer, chat_template_kwargs=switch)
    answers = 0 if thinking else 7
    assert len([prompt for prompt in seen[1:] if "\n\nCANDIDATE\n" in prompt]) == answers
    assert not any("think>" in prompt for prompt in seen)
    assert log["rewards/format_reward/mean"] == answers / 8
    assert json.loads(groups[0][6]).count(-1) == (8 if thinking else 1)


def test_trainer_warns_of_a_policy_whose_thoughts_would_be_judged(tiny_policy, training, caplog):
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    tokenizer.chat_template = of_trl("qwen3")
    for check, times in (("think", 0), ("none", 1)):
        training(processing_class=tokenizer, **STEP | {"format_check": check})
        assert caplog.text.count("the judge reads the thoughts") == times


@pytest.mark.parametrize(
    ("begun", "of_eight", "check", "said"),
    [
        *(("<think>Hm, ", 5, "none", "rollouts: 5 of 8 begin with a tag"), ("Hm.</think>", 8, "none", "8 of 8 begin")),
        *(("<think>Hm, ", 4, "none", ""), ("<plan>Hm.</plan>", 8, "(?P<answer>.*)", "")),
    ],
)
def test_trainer_warns_once_of_rollouts_that_begin_with_a_thought(
    training, caplog, monkeypatch, begun, of_eight, check, said
):
    monkeypatch.setattr(PlainTrainer, "script", lambda *about: begun * (about[-1] < of_eight) + f"Wait {about[-1]} s.")
    training(cls=PlainTrainer, max_steps=2, **STEP | {"format_check": check}).train()
    found = [text for text in caplog.messages if "set format_check to think" in text]
    assert len(found) == bool(said) and said in "".join(found)


class LateTrainer(PlainTrainer):
    """Answers in these steps alone."""

    answers = ()
    answers_evaluations = False

    def script(self, step, prompt, place):
        text = super().script(step, prompt, place)
        answers = step in self.answers or (self.answers_evaluations and not self.model.training)
        return f"<think>{THOUGHT}</think>{text}" if answers else text


def test_trainer_stops_if_the_first_generations_hold_no_answer(tmp_path, training, rows):
    evaluation = dict(eval_strategy="steps", eval_steps=1, eval_dataset=rows.select([0, 1]))
    trainer = training(cls=LateTrainer, max_steps=6, **STEP, **evaluation)
    trainer.answers = (3, 4, 5)
    for trainer.answers_evaluations in (False, True):  # every training gets its own first generations
        with pytest.raises(SettingsError, match="nothing to rank in the first 3 generations") as error:
            trainer.train()
        assert trainer.state.global_step == 2, "evaluations do not count"
    tokens = len(trainer._tokenizer("Answer 0 is: wait three minutes.")["input_ids"]) + 1
    said = ("none of the 8 rollouts", "format_check='think'", "max_completion_length", "Answer 0 is: wait")
    for part in (*said, f"The longest has {tokens} tokens"):
        assert part in str(error.value)
    assert {row[1] for row in contents(tmp_path / LIVE_STORE)["groups"]} == {0, 1}


def test_trainer_warns_of_a_generation_without_an_answer_after_the_first_one(training, caplog):
    trainer = training(cls=LateTrainer, max_steps=6, **STEP)
    trainer.answers = (2,)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert trainer.state.global_step == 6
    assert re.findall(r"step (\d): none of the 8 rollouts has an answer", caplog.text) == ["0", "1", "3", "4", "5"]
