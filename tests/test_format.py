"""The format check and the format reward: what counts as an answer, and that no text breaks the reader."""

import re
from pathlib import Path

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rankbuffer_trl._answers import (
    Answer,
    AnswerExtractor,
    check_format,
    completion_text,
    format_reward,
    read_answer,
)
from rankbuffer_trl.errors import SettingsError

TAGGED = r"<answer>(?P<answer>.*)</answer>"


def test_read_answer_of_each_check():
    for check, text, answer, well_formed in (
        # `think` wants one closed block and an answer
        ("think", " \n<think>\na\n</think>\n\nb\nc \n", "b\nc", True),
        ("think", "<think></think>b", "b", True),
        ("think", "<think>1 < 2 </ think></think>3 > 2 <b>", "3 > 2 <b>", True),
        *(("think", text, "", False) for text in ("<think>a</think> \n\t", "<think>a", "b", "", "<THINK>a</THINK>b")),
        ("think", "<think>a</think>b</think>", "", False),
        *(("think", f"{text}</think>b", "b", False) for text in ("hello <think>a", "a", "<think>a</think>")),
        ("think", "<think>a</think>b<think>c</think>d", "d", False),
        ("think", "<think>a<think>b</think>c", "c", False),
        ("think", "<think>a</think><think>b", "<think>b", False),
        # `none` wants any text
        ("none", " b\n", "b", True),
        ("none", "<think>a</think>b", "<think>a</think>b", True),
        ("none", " \n\u2003", "", False),
        # a regular expression must match the whole text
        (TAGGED, "<answer> b\nc </answer>", "b\nc", True),
        *((TAGGED, f"{text}</answer>{end}", "", False) for text, end in (("well: <answer>b", ""), ("<answer> ", ""))),
        (TAGGED, "<answer>b</answer> ok", "", False),
        (r"(?P<answer>A: .+)", "A: b", "A: b", True),
        (r"(?P<answer>a)?b", "b", "", False),
    ):
        assert read_answer(text, check) == Answer(answer, well_formed), (check, text)
    assert read_answer(" <think> ") == Answer("<think>", True), "`none` is the default"


PIECES = ["<think>", "</think>", "<think", "<", ">", "/", "a", " ", "\n", "<answer>", "</answer>", "\x1f"]
STARTS = st.sampled_from(["", "<think>a</think>", "<answer>"])
PIECED = st.builds(lambda start, rest: start + "".join(rest), STARTS, st.lists(st.sampled_from(PIECES), max_size=5))


@given(st.text() | PIECED, st.sampled_from(["think", "none", TAGGED]))
def test_read_answer_is_never_empty_when_well_formed_and_never_holds_thinking(text, check):
    answer = read_answer(text, check)
    assert answer.text == answer.text.strip()
    assert answer.text in text
    if answer.well_formed:
        assert answer.text
    if check == "think":
        assert "</think>" not in answer.text
        assert not answer.well_formed or (text.count("<think>"), text.count("</think>")) == (1, 1)


def test_read_answer_takes_long_adversarial_texts_without_backtracking():
    """A reader that backtracks would take hours, and the time limit of a test would end it."""
    n = 200_000
    for filler in ("<think>", "</think>", "<", "\n", "a ", " a", "<think></think>", "</think>\n"):
        for start in ("", "<think>", "<think>a</think>b", "\n" * 1000):
            for end in ("", "<think><think>", "</think>", "\n"):
                read_answer(start + filler * (n // len(filler)) + end, "think")


def test_completion_text_puts_thinking_back():
    for message, text in (
        ({"content": "b"}, "b"),
        ({"content": "b", "reasoning_content": "a"}, "<think>a</think>b"),
        ({"content": None, "reasoning_content": "a"}, "<think>a</think>"),
        ({"content": "b", "reasoning_content": None}, "b"),
    ):
        assert completion_text([{"role": "assistant", "content": "x"}, {"role": "assistant"} | message]) == text
    assert completion_text("plain") == "plain"


# With a tokenizer


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose one special token is `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


MESSAGES = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ENDS = MESSAGES + "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"  # as of Phi-3
OPENS = MESSAGES + "{% if add_generation_prompt and thinking is not defined %}\n<think>\n{% endif %}"
PROMPTS = [[{"role": "user", "content": "What does <think> do?"}]] * 4
TEXTS = ["<think>a</think>b<eos>", "a\n</think>\nb<eos>", "never closed", "x</think>"]


def read_ids(template: str, check: str = "think", prompts=PROMPTS, **kwargs) -> list[Answer]:
    tokenizer = tokenizer_with(template)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    return AnswerExtractor(check, tokenizer, **kwargs).read(prompts, ["ignored"] * len(TEXTS), ids)


def of_trl(name: str) -> str:
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


UNOPENED = [Answer("b", True), Answer("b", False), Answer("", False), Answer("", False)]
OPENED = [Answer("b", False), Answer("b", True), Answer("", False), Answer("", False)]
CLOSED = [Answer("b", False), Answer("b", False), Answer("never closed", True), Answer("", False)]


def test_answer_extractor_knows_whether_the_prompt_began_the_thinking():
    for template, kwargs, answers in (
        (MESSAGES + "\nA:", {}, UNOPENED),
        (ENDS, {}, UNOPENED),
        (ENDS.replace("assistant|>", "assistant|><think>"), {}, OPENED),
        (OPENS, {}, OPENED),
        (OPENS, {"thinking": False}, UNOPENED),
        (of_trl("qwen3"), {}, UNOPENED),
        (of_trl("qwen3"), {"enable_thinking": True}, UNOPENED),
        (of_trl("qwen3"), {"enable_thinking": False}, CLOSED),
        (of_trl("qwen3_5_think"), {}, OPENED),
        (of_trl("deepseek_r1_distill"), {}, OPENED),
    ):
        assert read_ids(template, chat_template_kwargs=kwargs) == answers, (template, kwargs)


def test_answer_extractor_knows_whether_it_takes_thoughts_for_answers():
    asked = [{"role": "user", "content": "Why?"}]

    def takes(template: str | None, check: str = "none", **kwargs) -> bool:
        return AnswerExtractor(check, tokenizer_with(template), kwargs).takes_thoughts(asked)

    assert takes(of_trl("qwen3")) and takes(of_trl("qwen3"), enable_thinking=True)
    assert not any((takes(MESSAGES), takes(None), takes(of_trl("qwen3"), "think")))
    assert not AnswerExtractor().takes_thoughts(asked)
    assert takes(of_trl("deepseek_r1_distill")) and not takes(of_trl("deepseek_r1_distill"), "think")
    assert not takes(of_trl("qwen3"), enable_thinking=False) and not takes(of_trl("qwen3_5_nothink"))


def test_answer_extractor_begins_no_thinking_for_other_checks_plain_prompts_and_texts():
    assert read_ids(OPENS, check="none")[2] == Answer("never closed", True)
    assert read_ids(OPENS, prompts=["How?"] * 4) == UNOPENED
    completions = [[{"role": "assistant", "content": "b", "reasoning_content": "a"}], "b"]
    answers = [Answer("b", True), Answer("", False)]
    assert AnswerExtractor("think", tokenizer_with(OPENS)).read(PROMPTS[:2], completions, None) == answers
    assert AnswerExtractor("think").read(PROMPTS[:2], completions, [[1], [2]]) == answers


def test_answer_extractor_decodes_a_completion_once_until_it_forgets():
    tokenizer = tokenizer_with(OPENS)
    decode, asked = tokenizer.batch_decode, []
    tokenizer.batch_decode = lambda parts, **kwargs: asked.extend(map(list, parts)) or decode(parts, **kwargs)
    reader, whole = AnswerExtractor("none", tokenizer), ([PROMPTS[0]] * 2, ["", ""], [[1, 2], [3]])
    early = reader.read([PROMPTS[0]], [""], [[3]])
    assert reader.read(*whole)[1:] == early and asked == [[3], [1, 2]]
    reader.forget()
    assert reader.read(*whole)[1:] == early and asked == [[3], [1, 2], [1, 2], [3]]


def test_format_reward_is_one_or_zero():
    answers = AnswerExtractor("think").read(PROMPTS[:3], ["<think>a</think>b", "b", "<think>a</think>"], None)
    assert format_reward(extracted_answer=answers, query_id=["x"] * 3) == [1.0, 0.0, 0.0]
    assert format_reward.__name__ == "format_reward"


@pytest.mark.parametrize("check", [check_format, AnswerExtractor])
def test_check_format_names_the_fault(check):
    check(TAGGED)
    with pytest.raises(SettingsError, match=r"format_check must be .*'\(\?P<answer' is not one: "):
        check("(?P<answer")
    for typo in ("thnk", r"<answer>(.*)</answer>", r"(?P<anwser>.*)"):
        with pytest.raises(SettingsError, match=re.escape(f"{typo!r} has no such group")):
            check(typo)
