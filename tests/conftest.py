"""Shared by all tests: small queries, judges that do as told, a tiny policy. Offline and seeded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from rankbuffer_trl.groups import Query, Rubric
from rankbuffer_trl.judge import Judge, TransportError, Usage

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "recipes" / "quickstart"
sys.path.insert(0, str(ROOT / "recipes"))
sys.path.insert(0, str(QUICKSTART))

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


class ScriptedClient:
    """A chat client whose answers a test decides: `answer(messages)` gives a text, or an exception to raise."""

    name = "scripted judge"

    def __init__(self, answer: Callable[[list[dict]], str | Exception]):
        self.answer = answer
        self.seen: list[list[dict]] = []

    async def complete(self, messages, *, seed):
        self.seen.append(messages)
        await asyncio.sleep(0)
        answer = self.answer(messages)
        if isinstance(answer, Exception):
            raise answer
        return answer, Usage(10, 4, 3), 1

    async def close(self):
        pass


def scripted_judge(answer: Callable[[list[dict]], str | Exception], **kwargs) -> Judge:
    return Judge(ScriptedClient(answer), **kwargs)


def unreachable(messages) -> Exception:
    return TransportError("connection refused", attempts=2)


@pytest.fixture
def query() -> Query:
    return Query(
        id="tea",
        prompt=[{"role": "user", "content": "How do I make tea?"}],
        rubrics=(Rubric("Says how long to wait: three minutes.", 5), Rubric("Is written in complete sentences.", 2)),
        responses=("no", "hot water", "boil water, wait", "Boil water. Wait.", "Wait three minutes.", "a b", "c d"),
    )


@pytest.fixture(scope="session")
def howto() -> list[dict]:
    """The quickstart's rows."""
    return [json.loads(line) for line in (QUICKSTART / "howto.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def data_file(howto, tmp_path_factory) -> Path:
    """Twelve of the quickstart's rows."""
    path = tmp_path_factory.mktemp("data") / "twelve.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in howto[:12]))
    return path


@pytest.fixture
def rows(data_file):
    from rankbuffer_trl.data.queries import load_queries

    return load_queries(str(data_file))


@pytest.fixture(scope="session")
def tiny_policy(howto, tmp_path_factory) -> str:
    """An untrained Qwen3 of one layer with the quickstart's tokenizer."""
    import policy
    import torch

    path = str(tmp_path_factory.mktemp("policy"))
    tokenizer = policy.build_tokenizer([text for row in howto for text in row["responses"]])
    torch.manual_seed(0)
    model = policy.build_model(
        tokenizer,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
