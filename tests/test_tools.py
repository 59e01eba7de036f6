"""Rollouts of several turns, by TRL's own loop: what the judge sees of a policy that calls tools."""

import re

import pytest
from conftest import scripted_judge
from helpers.scripted import ScriptedTrainer, contents
from test_format import of_trl
from transformers import AutoTokenizer

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge.rubric_judge import judge as rubric_verdict
from rankbuffer_trl.store.places import LIVE_STORE

SECRET = "The kettle sings at noon."  # stands in the book alone, so only a tool can say it


class Book:
    """An environment with one tool."""

    def reset(self, **row):
        self.row = row

    def look_up(self, word: str) -> str:
        """Look up a word.

        Args:
            word: The word.
        """
        return f"{word}: {SECRET}"


def call(word: str) -> str:
    return f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{word}"}}}}\n</tool_call>'


class CallingTrainer(ScriptedTrainer):
    """Every rollout looks up a word that names its place, and then answers."""

    turns = ("<think>t</think>I look. {call}", "<think>u</think>Answer {place} is: wait three minutes.")

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        texts = []
        for row, ids in enumerate(prompt_ids):
            said = self._tokenizer.decode(ids).split("<|im_start|>")
            place = next((found[1] for text in said if (found := re.search(r'"w(\d)"', text))), row % 8)
            turn = sum(text.startswith("assistant") for text in said) - 1
            texts.append(self.turns[turn].format(call=call(f"w{place}"), place=place))
        ids = [self._tokenizer(text)["input_ids"] + [self._tokenizer.eos_token_id] for text in texts]
        return ids, None


@pytest.fixture
def calling(tmp_path, tiny_policy, training):
    """Train for one step with an environment. Return what the judge was asked, the store, and the log."""

    def train(cls=CallingTrainer, **settings):
        seen = []

        def watch(messages):
            seen.append(messages[0]["content"])
            return rubric_verdict(messages[0]["content"])

        tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
        tokenizer.chat_template = of_trl("qwen3")
        size = dict(max_completion_length=400, model_init_kwargs={"max_position_embeddings": 4096})
        given = dict(max_steps=1, per_device_train_batch_size=8, format_check="think") | size | settings
        given |= dict(judge=scripted_judge(watch, guard=True), processing_class=tokenizer)
        trainer = training(cls=cls, **({"environment_factory": Book} | given))
        trainer.train()
        return seen[1:], contents(tmp_path / LIVE_STORE), trainer.state.log_history[0]

    return train


@pytest.mark.parametrize("check", ["none", "think"])
def test_trainer_has_no_words_of_a_tool_judged_as_the_policys(calling, check):
    with pytest.raises(SettingsError, match=r"^tools and environments are not supported: .*policy's words$"):
        calling(format_check=check)
