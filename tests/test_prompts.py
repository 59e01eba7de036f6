"""What a policy reads of a row: all that the judge reads, and no more, in the chat templates of real models."""

import pytest
from test_format import of_trl, tokenizer_with

from rankbuffer_trl.data._prompts import check_prompts, unstopped_turn
from rankbuffer_trl.data._queries import DataError

USER = {"role": "user", "content": "Why?"}
CALL = {"role": "assistant", "content": "I look.", "tool_calls": [{"name": "f", "arguments": {}}]}
THOUGHTS = "<think>\nHm.\n</think>\n\nSo."


def chat(*roles: str) -> list[dict]:
    """Return messages; a role with a `+` has thoughts before its text."""
    return [{"role": role.strip("+"), "content": THOUGHTS if "+" in role else f"Text {role}."} for role in roles]


@pytest.mark.parametrize(
    ("template", "prompt", "fault"),
    [
        *((name, chat("system", "user", "assistant", "user"), None) for name in ("qwen3", "phi3", "gptoss", "lfm2")),
        ("qwen3", [{"role": "user", "content": "Hi.", "name": "bob", "tool_calls": None}], None),  # neither reads them
        ("idefics3", chat("user", "assistant", "user"), None),  # reads parts alone
        ("gemma3", chat("assistant+", "user")[1:], None),
        ("llama3", chat("human", "developer", "user", "assistant+", "user"), None),  # writes every role
        *((name, chat("developer", "user"), "'developer'") for name in ("qwen3", "qwen2_5", "phi3")),
        *(("qwen3", chat(role, "user"), f"'{role}'") for role in ("model", "human", "gpt", "System")),
        ("gptoss", chat("system", "system", "user"), "a message of the role 'system'"),
        ("deepseek_r1_distill", chat("system", "system", "user"), "a message of the role 'system'"),
        ("cohere2", chat("user", "assistant", "tool", "user"), "'tool'"),
        ("qwen3", chat("user", "assistant+", "user"), "the thoughts in a message of the role 'assistant'"),
        ("qwen3", [CALL, *chat("user")], "leave out tool_calls"),
        ("gemma", chat("system", "user"), "refuses a prompt of the roles system, user"),
    ],
)
def test_check_prompts_refuses_what_judge_and_policy_read_differently(template, prompt, fault):
    tokenizer = tokenizer_with(of_trl(template))
    tokenizer.bos_token = "<s>"
    rows = [{"prompt": each, "query_id": "q", "place": f"row {i}"} for i, each in enumerate((chat("user"), prompt), 1)]
    if fault is None:
        check_prompts(rows, tokenizer)
        return
    with pytest.raises(DataError, match=fault) as error:
        check_prompts([*rows, *rows], tokenizer)
    assert str(error.value).startswith("row 2 (query_id 'q'): ")


def test_check_prompts_renders_each_pattern_once():
    tokenizer, rendered = tokenizer_with(of_trl("qwen3")), []
    plain = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **kwargs: rendered.append(messages) or plain(messages, **kwargs)
    prompt = chat("user", "assistant", "user")
    rows = [{"prompt": prompt, "query_id": str(i), "place": f"row {i}"} for i in range(1, 50)]
    check_prompts(rows, tokenizer)
    assert len(rendered) == 2
    with pytest.raises(DataError, match="the thoughts in"):  # another pattern, of the same roles
        check_prompts([*rows, rows[0] | {"prompt": chat("user", "assistant+", "user")}], tokenizer)


@pytest.mark.parametrize(
    ("template", "stops", "turn"),
    [
        ("qwen3", ["<|im_end|>"], None),
        ("qwen3", ["<|endoftext|>"], "<|im_end|>"),  # a base model's
        ("qwen3", ["<|endoftext|>", "<|im_end|>"], None),
        ("phi3", ["<|endoftext|>"], None),  # the second of its two marks stops
        ("phi3", ["<s>"], "<|end|>"),
        ("idefics3", ["<s>"], None),  # does not write a text
        ("glm4moe", ["<s>"], None),  # ends an answer by nothing
        (None, ["<s>"], None),
    ],
)
def test_unstopped_turn_is_the_end_of_an_answer_at_which_no_generation_ends(template, stops, turn):
    tokenizer = tokenizer_with(of_trl(template) if template else "")
    names = ["<s>", "<|im_end|>", "<|end|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.eos_token = "<|endoftext|>"
    found = unstopped_turn(tokenizer, chat("user"), tokenizer.convert_tokens_to_ids(stops))
    assert found == (turn and (turn, tokenizer.convert_tokens_to_ids(turn)))
