"""What a reward method is: one frozen dataclass in one file, whose fields are its arguments.

A new method is a new file that holds such a class, and a recipe that names it: `method: my_package.my_file.MyMethod`.
Nothing else changes.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Protocol

from ..buffer import AnchorBuffer
from ..groups import RolloutGroup
from ..judge import Judge, Question


@dataclass(frozen=True)
class GroupScore:
    """What a reward method returns for one group.

    Args:
        rewards (`tuple[float | None, ...]`):
            One per rollout, in rollout order, each in [-1, 1]; `None` where no judge could say.
        order (`tuple[tuple[int, ...], ...]`):
            The complete order from worst to best as tiers of rollout ids: one id per tier, several where they tie.
        positions (`dict[int, int]`):
            Insertion position in 0..K by rollout id. Empty where there was no coarse ranking.
        fine_ranked (`bool`):
            Whether at least one interval held two or more rollouts, so that they had to be ranked among themselves.
        before (`AnchorBuffer`, *optional*):
            The buffer the group was ranked against. `None` if there was none yet.
        after (`AnchorBuffer`, *optional*):
            The buffer for the next visit.
    """

    rewards: tuple[float | None, ...]
    order: tuple[tuple[int, ...], ...] = ()
    positions: dict[int, int] = field(default_factory=dict)
    fine_ranked: bool = False
    before: AnchorBuffer | None = None
    after: AnchorBuffer | None = None


class RewardMethod(Protocol):
    """Turns a group into a reward per rollout. All judge calls go through the one seam."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: str
    """Goes into the ledger."""

    @property
    def responses_needed(self) -> int:
        """How many reference responses every query must have."""

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """Rewards in [-1, 1], one per rollout, `None` where no judge could say; and the next buffer, if it keeps one.

        A rollout without an answer is never judged and has the reward -1. A failed judgment is never a score.
        """

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """How many questions a group costs at least and at most. `first`: the query has no buffer yet."""

    def first_questions(self, group: RolloutGroup) -> list[Question]:
        """What the first visit of a query asks for certain and at once."""


def score_by_reward(group: RolloutGroup, rewards: Mapping[int, float | None]) -> GroupScore:
    """The score of a method without a buffer, from the rewards of the answered rollouts by id.

    Rollouts without an answer get -1. The order is that of the rewards; equal ones share a tier.
    """
    known = {reward for reward in rewards.values() if reward is not None}
    order = (tuple(i for i, reward in rewards.items() if reward == level) for level in sorted(known))
    empty = {rollout.id: -1.0 for rollout in group.empty}
    complete = {**rewards, **empty}
    return GroupScore(tuple(complete[rollout.id] for rollout in group.rollouts), tuple(order))


def load_method(name: str, arguments: Mapping[str, Any], seed: int) -> RewardMethod:
    """The method that a recipe names.

    Args:
        name (`str`):
            A file of this folder, such as `pairwise_rank`, or the dotted path of a dataclass elsewhere.
        arguments (`Mapping[str, Any]`):
            Its arguments.
        seed (`int`):
            The run's seed, for methods that have an argument `seed`.

    Raises:
        `ValueError`: if there is no such method, or no such argument.
    """
    module, _, attribute = name.rpartition(".")
    try:
        cls = getattr(import_module(module), attribute) if module else import_module(f".{name}", __package__).METHOD
        fields = dataclasses.fields(cls)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"there is no reward method {name!r} ({error}): name a file of rankbuffer_trl/rewards, such as"
            " rankbuffer, or the dotted path of a dataclass"
        ) from None
    known = [field.name for field in fields]
    for key in arguments:
        if key not in known:
            raise ValueError(f"method_args: {name} has no argument {key!r}; it has {', '.join(known) or 'none'}")
    return cls(**({"seed": seed} if "seed" in known else {}) | dict(arguments))
