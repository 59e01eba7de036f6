"""What the tests of the experiments share: a query, the quickstart's rows and an untrained policy."""

import os

# Libraries read these when they are imported, so they are set first.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


import pytest
from hypothesis import settings

from rankbuffer_trl.groups import Query, Rubric

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


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
    """Return the rows of the quickstart's data set."""
    from recipes.quickstart import policy

    return list(policy.load_queries(str(policy.DATA)))


@pytest.fixture(scope="session")
def tiny_policy(howto, tmp_path_factory) -> str:
    """Return the folder of an untrained policy with the quickstart's tokenizer."""
    import torch

    from recipes.quickstart import policy

    path = str(tmp_path_factory.mktemp("policy"))
    tokenizer = policy.build_tokenizer([text for row in howto for text in row["responses"]])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    model = policy.build_model(tokenizer, num_attention_heads=2, num_key_value_heads=1, **sizes)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
