"""RankBuffer: ranking-based rewards for GRPO at close to pointwise cost, on TRL."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "BufferStore": ".store",
    "GroupRanker": "._group_ranker",
    "GroupScore": ".rewards._method",
    "Judge": ".judge",
    "RankBuffer": ".rewards._rankbuffer",
    "RankBufferConfig": ".training._config",
    "RankBufferError": ".errors",
    "RankBufferReward": ".training._reward_function",
    "RankBufferTrainer": ".training._trainer",
    "load_queries": ".data._queries",
    "rank_texts": "._group_ranker",
    "read_store": ".store._places",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use, so that `import rankbuffer_trl` does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
