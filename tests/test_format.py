"""The format check and the format reward: what counts as an answer, and that no text breaks the reader."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.rewards.format import (
    Answer,
    AnswerReader,
    check_format,
    completion_text,
    format_reward,
    read_answer,
)

TAGGED = r"<answer>(?P<answer>.*)</answer>"


@pytest.mark.parametrize(
    ("text", "answer", "well_formed"),
    [
        ("<think>a</think>b", "b", True),
        (" \n<think>\na\n</think>\n\nb\nc \n", "b\nc", True),
        ("<think></think>b", "b", True),
        ("<think>1 < 2 </ think></think>3 > 2 <b>", "3 > 2 <b>", True),
        ("<think>a</think>", "", False),
        ("<think>a</think> \n\t", "", False),
        ("<think>a", "", False),
        ("b", "", False),
        ("", "", False),
        ("<THINK>a</THINK>b", "", False),
        ("hello <think>a</think>b", "b", False),
        ("a</think>b", "b", False),
        ("<think>a</think>b<think>c</think>d", "d", False),
        ("<think>a</think><think>c</think>d", "d", False),
        ("<think>a<think>b</think>c", "c", False),
        ("<think>a<think>b</think></think>c", "c", False),
        ("<think>a</think></think>b", "b", False),
        ("<think>a</think>b</think>", "", False),
        ("<think>a</think></think>", "", False),
        ("<think>a</think>b<think>", "b<think>", False),
        ("<think>a</think><think>b", "<think>b", False),
    ],
)
def test_think_wants_one_closed_block_and_an_answer(text, answer, well_formed):
    assert read_answer(text, "think") == Answer(answer, well_formed)


@pytest.mark.parametrize(
    ("text", "answer", "well_formed"),
    [
        (" b\n", "b", True),
        ("<think>a</think>b", "<think>a</think>b", True),
        ("", "", False),
        (" \n\u2003", "", False),
    ],
)
def test_none_wants_any_text(text, answer, well_formed):
    assert read_answer(text, "none") == Answer(answer, well_formed)


@pytest.mark.parametrize(
    ("check", "text", "answer", "well_formed"),
    [
        (TAGGED, "<answer> b\nc </answer>", "b\nc", True),
        (TAGGED, "well: <answer>b</answer>", "", False),
        (TAGGED, "<answer>b</answer> ok", "", False),
        (TAGGED, "<answer>b", "", False),
        (TAGGED, "<answer> </answer>", "", False),
        (TAGGED, "<answer></answer>", "", False),
        (r"(?P<answer>A: .+)", "A: b", "A: b", True),
        (r"(?P<answer>A: .+)", "b", "", False),
        (r"(?P<answer>\s*)", " ", "", False),
        (r"(?P<answer>a)?b", "b", "", False),
    ],
)
def test_a_regex_must_match_the_whole_text(check, text, answer, well_formed):
    assert read_answer(text, check) == Answer(answer, well_formed)


PIECES = st.sampled_from(
    ["<think>", "</think>", "<think", "<", ">", "/", "a", " ", "\n", "<answer>", "</answer>", "\x1f"]
)


PIECED = st.tuples(st.sampled_from(["", "<think>a</think>", "<answer>"]), st.lists(PIECES, max_size=5)).map(
    lambda text: text[0] + "".join(text[1])
)


@settings(max_examples=400)
@given(st.one_of(st.text(), PIECED), st.sampled_from(["think", "none", TAGGED]))
def test_a_well_formed_answer_is_never_empty_and_never_holds_thinking(text, check):
    answer = read_answer(text, check)
    assert answer.text == answer.text.strip()
    assert answer.text in text
    if answer.well_formed:
        assert answer.text
    if check == "think":
        assert "</think>" not in answer.text
        assert not answer.well_formed or (text.count("<think>"), text.count("</think>")) == (1, 1)


def test_long_adversarial_texts_are_read_without_backtracking():
    # In a process of its own, so that catastrophic backtracking fails this test instead of hanging the run.
    program = """
import json, sys
from rankbuffer_trl.rewards.format import read_answer
n = 200_000
fillers = ["<think>", "</think>", "<", "\\n", "a", "a ", " a", "<think></think>", "</think>\\n"]
starts = ["", "<think>", "<think></think>", "<think>a</think>b", "\\n" * 1000]
ends = ["", "<think>", "<think><think>", "</think>", "</think></think>", "\\n"]
read = [read_answer(s + f * (n // len(f)) + e, "think") for f in fillers for s in starts for e in ends]
json.dump(len(read), sys.stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=True)
    assert json.loads(done.stdout) == 9 * 5 * 6


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "b"}], "b"),
        ([{"role": "assistant", "content": "b", "reasoning_content": "a"}], "<think>a</think>b"),
        ([{"role": "assistant", "content": None, "reasoning_content": "a"}], "<think>a</think>"),
        ([{"role": "assistant", "content": "b", "reasoning_content": None}], "b"),
        ([{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}], "y"),
    ],
)
def test_completion_text_puts_thinking_back(completion, text):
    assert completion_text(completion) == text


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose one special token is `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}" + template
    return tokenizer


OPENS = "{% if add_generation_prompt and thinking is not defined %}\n<think>\n{% endif %}"
PROMPTS = [[{"role": "user", "content": "How?"}]] * 3


def read_ids(template: str, texts: list[str], check: str = "think", **kwargs) -> list[Answer]:
    tokenizer = tokenizer_with(template)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return AnswerReader(check, tokenizer, **kwargs).read(PROMPTS[: len(texts)], ["ignored"] * len(texts), ids)


def test_thinking_that_the_prompt_opened_counts_as_opened():
    answers = read_ids(OPENS, ["a\n</think>\nb<eos>", "never closed", "<think>a</think>b"])
    assert answers == [Answer("b", True), Answer("", False), Answer("b", False)]


def test_thinking_that_the_prompt_left_closed_must_be_opened_by_the_policy():
    assert read_ids("\nA:", ["a</think>b", "<think>a</think>b<eos>"]) == [Answer("b", False), Answer("b", True)]


def test_the_prompt_is_rendered_with_the_trainers_template_kwargs():
    texts = ["a</think>b"]
    assert read_ids(OPENS, texts) == [Answer("b", True)]
    assert read_ids(OPENS, texts, chat_template_kwargs={"thinking": False}) == [Answer("b", False)]


TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@pytest.mark.parametrize(
    ("template", "kwargs", "begun"),
    [
        ("qwen3", {}, ""),
        ("qwen3", {"enable_thinking": True}, ""),
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ("qwen3_5_think", {}, "<think>\n"),
        ("deepseek_r1_distill", {}, "<think>\n"),
    ],
)
def test_real_templates_begin_the_thinking_or_do_not(template, kwargs, begun):
    tokenizer = tokenizer_with("")
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    prompts = [[{"role": "user", "content": "What does <think> do?"}]] * 3
    texts = [f"{'' if begun else '<think>'}{'' if '</' in begun else 'a</think>'}b<eos>", "never closed", "x</think>"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    reader = AnswerReader("think", tokenizer, kwargs)
    answers = reader.read(prompts, ["ignored"] * 3, ids)
    assert reader._begun == begun
    assert answers[0] == Answer("b", True)
    closed = "</" in begun  # then all that follows is the answer
    assert answers[1] == (Answer("never closed", True) if closed else Answer("", False))
    assert answers[2] == Answer("", False)


def test_other_checks_do_not_see_the_opened_thinking():
    assert read_ids(OPENS, ["b<eos>"], check="none") == [Answer("b", True)]


def test_a_plain_text_prompt_opens_nothing():
    tokenizer = tokenizer_with(OPENS)
    ids = [tokenizer("a</think>b")["input_ids"]]
    assert AnswerReader("think", tokenizer).read(["How?"], ["ignored"], ids) == [Answer("b", False)]


def test_completions_are_taken_as_they_come_without_ids():
    reader = AnswerReader("think", tokenizer_with(OPENS))
    completions = [[{"role": "assistant", "content": "b", "reasoning_content": "a"}], "b"]
    assert reader.read(PROMPTS[:2], completions, None) == [Answer("b", True), Answer("", False)]


def test_format_reward_is_one_or_zero():
    answers = AnswerReader("think").read(PROMPTS, ["<think>a</think>b", "b", "<think>a</think>"], None)
    assert format_reward(extracted_answer=answers, query_id=["x"] * 3) == [1.0, 0.0, 0.0]
    assert format_reward.__name__ == "format_reward"


@pytest.mark.parametrize("check", [check_format, AnswerReader])
def test_check_format_reads_or_names_the_fault(check):
    check(TAGGED)
    with pytest.raises(SettingsError, match=r"format_check must be .*'\(\?P<answer' is not one: "):
        check("(?P<answer")
    for typo in ("thnk", r"<answer>(.*)</answer>", r"(?P<anwser>.*)"):
        with pytest.raises(SettingsError, match=re.escape(f"{typo!r} has no such group")):
            check(typo)
