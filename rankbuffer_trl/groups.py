"""The nouns that travel: a query with its rubrics, and its rollouts as a group.

Plain immutable data: no torch, no network, no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Rubric:
    """One judging criterion of a query.

    Args:
        text (`str`):
            What a good response does, in a sentence or short phrase.
        weight (`int`):
            Importance from 1 to 5.
    """

    text: str
    weight: int


@dataclass(frozen=True)
class Query:
    """A query `x` with what a judge needs to know of it.

    Args:
        id (`str`):
            Unique in the data set.
        prompt (`list[dict]`):
            Chat messages with `role` and `content`.
        rubrics (`tuple[Rubric, ...]`):
            The query's weighted rubrics `R_x`.
        responses (`tuple[str, ...]`, *optional*, defaults to `()`):
            Reference responses from worst to best, from which the first anchors are selected.
    """

    id: str
    prompt: Messages
    rubrics: tuple[Rubric, ...]
    responses: tuple[str, ...] = ()

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Query":
        """Make a query from a row of a training set. The row may lack `rubrics` and `responses`."""
        return cls(
            id=row["query_id"],
            prompt=row["prompt"],
            rubrics=tuple(Rubric(rubric["text"], rubric["weight"]) for rubric in row.get("rubrics") or ()),
            responses=tuple(row.get("responses") or ()),
        )

    @property
    def text(self) -> str:
        """The query as a judge reads it: the one user message, or all turns under their roles."""
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in self.prompt)


@dataclass(frozen=True)
class Rollout:
    """One response `y_i` that the policy sampled for a query.

    Args:
        id (`int`):
            Its place in the group, from 0 to G-1. The judge sees it as `[R<id>]`.
        text (`str`):
            The answer alone, without the thinking. Empty if the rollout has no answer; it is then never judged.
    """

    id: int
    text: str


@dataclass(frozen=True)
class RolloutGroup:
    """The `G` rollouts sampled together for one query.

    Args:
        query (`Query`):
            The query `x`.
        rollouts (`tuple[Rollout, ...]`):
            All `G` rollouts, the empty ones too, with ids 0 to G-1 in this order.
        step (`int`):
            The trainer's global step when they were generated, from 0.
        epoch (`int`, *optional*):
            Which pass over the data this is, from 0. `None` if nobody knows; [`GroupScorer`] then counts the query's
            visits.
    """

    query: Query
    rollouts: tuple[Rollout, ...]
    step: int
    epoch: int | None = None

    @property
    def known_epoch(self) -> int:
        """The epoch, in a group that a method scores: [`GroupScorer`] has seen to it.

        Raises:
            `ValueError`: if nobody has said it.
        """
        if self.epoch is None:
            raise ValueError(f"the group of query {self.query.id!r} at step {self.step} has no epoch")
        return self.epoch

    @property
    def answered(self) -> tuple[Rollout, ...]:
        """The rollouts that have an answer, which are the ones a judge may see."""
        return tuple(rollout for rollout in self.rollouts if rollout.text)

    @property
    def empty(self) -> tuple[Rollout, ...]:
        """The rollouts without an answer, which stand below all others."""
        return tuple(rollout for rollout in self.rollouts if not rollout.text)


def storable(text: str) -> str:
    """Replace each lone surrogate by a question mark. UTF-8, and so the store and a request, cannot hold one."""
    return text.encode("utf-8", "replace").decode("utf-8")
