"""What comes back for a group: its rewards, and what ranking it did to the buffer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .buffer import AnchorBuffer
from .groups import RolloutGroup


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


def score_by_reward(group: RolloutGroup, rewards: Mapping[int, float | None]) -> GroupScore:
    """The score of a method without a buffer, from the rewards of the answered rollouts by id.

    Rollouts without an answer get -1. The order is that of the rewards; equal ones share a tier.
    """
    known = {reward for reward in rewards.values() if reward is not None}
    order = (tuple(i for i, reward in rewards.items() if reward == level) for level in sorted(known))
    empty = {rollout.id: -1.0 for rollout in group.empty}
    complete = {**rewards, **empty}
    return GroupScore(tuple(complete[rollout.id] for rollout in group.rollouts), tuple(order))
