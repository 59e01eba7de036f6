"""The data that all parts share: a query with its rubrics, and the group of its rollouts.

These classes are immutable. They need no torch, no network and no files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Rubric:
    """One criterion by which the responses to a query are judged.

    Args:
        text (`str`):
            A sentence or short phrase that says what a good response does.
        weight (`int`):
            From 1 to 5. From -5 to -1, the text names a fault, which a good response does not have.
    """

    text: str
    weight: int


@dataclass(frozen=True)
class Query:
    """A query `x` with what a judge needs to know about it.

    Args:
        id (`str`):
            Unique in the data set.
        prompt (`list[dict]`):
            Chat messages with `role` and `content`.
        rubrics (`tuple[Rubric, ...]`):
            The query's weighted rubrics `R_x`.
        responses (`tuple[str, ...]`, *optional*, defaults to `()`):
            Reference responses from worst to best, of which the first anchors are selected.
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
        """The query as a judge reads it: the only message, or all turns with their roles."""
        if len(self.prompt) == 1:
            return self.prompt[0]["content"]
        return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in self.prompt)


@dataclass(frozen=True)
class Rollout:
    """One response `y_i` that the policy sampled for a query.

    Args:
        id (`int`):
            The index of the rollout in the group, from 0 to G-1. The judge sees it as `[R<id>]`.
        text (`str`):
            The answer alone, without the thinking. It is empty if the rollout has no answer.
    """

    id: int
    text: str


@dataclass(frozen=True)
class RolloutGroup:
    """The `G` rollouts that were sampled together for one query.

    Args:
        rollouts (`tuple[Rollout, ...]`):
            All `G` rollouts, with ids 0 to G-1 in this order, also those without an answer.
        step (`int`):
            The trainer's global step at which the rollouts were generated, from 0.
        epoch (`int`, *optional*):
            The number of the pass over the data, from 0. `None` if the trainer does not know it.
    """

    query: Query
    rollouts: tuple[Rollout, ...]
    step: int
    epoch: int | None = None  # [`Step`] then takes the number of the query's earlier visits

    @property
    def known_epoch(self) -> int:
        """The epoch of a group that a reward method scores.

        Raises:
            `ValueError`: if the epoch is not set.
        """
        if self.epoch is None:
            raise ValueError(f"the group of query {self.query.id!r} at step {self.step} has no epoch")
        return self.epoch

    @property
    def answered(self) -> tuple[Rollout, ...]:
        """The rollouts with an answer. The judge sees only these, except in Tournament-GRPO."""
        return tuple(rollout for rollout in self.rollouts if rollout.text)

    @property
    def empty(self) -> tuple[Rollout, ...]:
        """The rollouts without an answer. They are below all others in the order."""
        return tuple(rollout for rollout in self.rollouts if not rollout.text)


def storable(text: str) -> str:
    """Replace each lone surrogate by a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")  # UTF-8, and so the store and a request, cannot hold one
