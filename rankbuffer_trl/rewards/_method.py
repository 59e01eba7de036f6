"""The interface of a reward method, the score that it returns, and the loader of the method that a recipe names.

A reward method is one frozen dataclass in one file, whose fields are its arguments. A new method is a new file that
holds such a class, with a name and `score`, and a recipe that names it: `method: my_package.my_file.MyMethod`. Nothing
else changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from fractions import Fraction
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Protocol

from ..buffer import AnchorBuffer
from ..errors import SettingsError
from ..groups import RolloutGroup
from ..judge import Judge
from ..ranking import Ranking, rank_tiers, rewards_from_ranks, tier_ranks
from ..settings import check_arguments, load_path, near
from ._cost import simulated_costs

METHOD_MEMBERS = ("name", "responses_needed", "score", "calls", "most_shown")  # of a reward method
# Commit e122f1a is the last with them.
REMOVED_METHODS = ("anchor_matches", "brpo", "rankbuffer_batch", "rankbuffer_looks")
REWARD_TOLERANCE = 1e-9  # by which a reward may leave its range; means of floating-point numbers do


@dataclass(frozen=True)
class GroupScore:
    """The rewards of one group, with the order and the buffer that they come from.

    Args:
        rewards (`tuple[float | None, ...]`):
            One reward per rollout, in rollout order, each in [-1, 1]. `None` marks an unscored rollout: its judgment
            failed. [`score_by_order`], [`score_by_rank`] and [`score_by_reward`] make them.
        order (`tuple[tuple[int, ...], ...]`, *optional*, defaults to `()`):
            Tiers of rollout ids from worst to best: one id per tier, several where they tie.
        positions (`dict[int, int]`, *optional*, defaults to `{}`):
            Insertion position in 0..K by rollout id. Empty where there was no coarse ranking.
        fine_ranked (`bool`, *optional*, defaults to `False`):
            Whether at least one interval held two or more rollouts.
        before, after (`AnchorBuffer`, *optional*):
            The buffer against which the group was ranked, and that for the next visit.

    Raises:
        `ValueError`: if a reward is outside [-1, 1], or is no number.

    Example:

    ```python
    from rankbuffer_trl import GroupScore

    # Rollout 2 has no answer. Rollout 1 is better than rollout 0.
    score = GroupScore(rewards=(0.0, 1.0, -1.0), order=((0,), (1,)))
    ```
    """

    rewards: tuple[float | None, ...]
    order: tuple[tuple[int, ...], ...] = ()
    positions: dict[int, int] = field(default_factory=dict)
    fine_ranked: bool = False
    before: AnchorBuffer | None = None
    after: AnchorBuffer | None = None

    def __post_init__(self) -> None:
        for i, reward in enumerate(self.rewards):
            if reward is not None and not abs(reward) <= 1 + REWARD_TOLERANCE:  # so written, it refuses NaN too
                text = f"the reward method gave rollout {i} the reward {reward}, which is not in [-1, 1]"
                raise ValueError(f"{text}: return None for a rollout without a reward, and scale the others")


class RewardMethod(Protocol):
    """A method that turns a group into one reward per rollout. It asks the judge through [`Judge`] only.

    A class that derives from this one needs a `name` and `score`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]  # so that type checkers take a method for a dataclass
    name: str
    """The name of the method in the ledger.

    A method may also have the attribute `shows_whole_groups = True`: every group is judged by prompts that show all of
    its rollouts. If such a prompt is too long for the judge, the whole group is lost. The preflight refuses a run in
    which this can happen, unless `most_shown` says that a prompt shows less than a group.
    """

    @property
    def responses_needed(self) -> int:
        """The number of reference responses that every query must have. 0 unless a method says more."""
        return 0

    async def score(self, group: RolloutGroup, buffer: AnchorBuffer | None, judge: Judge) -> GroupScore:
        """Return one reward in [-1, 1] per rollout and, if the method keeps one, the next buffer.

        A rollout without an answer has the reward -1 and, except in Tournament-GRPO, is never judged. A failed
        judgment is never a score: the rollouts that it was about have the reward `None`. `score` waits for nothing but
        the judge, and keeps nothing: it also runs to record its questions.

        Args:
            group (`RolloutGroup`):
                The rollouts of one query. [`Step`] has set its epoch.
            buffer (`AnchorBuffer`, *optional*):
                The query's buffer, `None` on its first visit.
        """

    def calls(self, group: RolloutGroup, first: bool) -> tuple[int, int]:
        """Return how many questions a group costs at least and at most. `first`: the query has no buffer yet."""
        # A guess by simulation, for methods that know no better. It asks equal questions more than once.
        costs = simulated_costs(self, len(group.rollouts), len(group.answered), len(group.query.rubrics))[not first]
        counts = [visit.calls for visit in costs]
        return min(counts), max(counts)

    def most_shown(self, G: int) -> int:
        """Return how many responses one prompt about a group of `G` can show, anchors and references included.

        The preflight and `rankbuffer-data check` estimate from it which context the judge needs.
        """
        return max(visit.most_shown for visits in simulated_costs(self, G, G) for visit in visits)


def score_by_order(group: RolloutGroup, order: Iterable[Sequence[int]], **fields: Any) -> GroupScore:
    """Return the score of a method that orders the rollouts. A rollout that `order` lacks has no reward.

    Args:
        order (`Iterable[Sequence[int]]`):
            Tiers of ids of answered rollouts, from worst to best: one id per tier, several where they tie.
        more:
            Further fields of [`GroupScore`].
    """
    return score_by_rank(group, tier_ranks(order), **fields)


def score_by_ranking(
    group: RolloutGroup,
    ranking: Ranking,
    before: AnchorBuffer,
    after: AnchorBuffer,
    order: Iterable[Sequence[int]] | None = None,
) -> GroupScore:
    """Return the score of a method that ranks a group against a buffer. `order` may replace that of the ranking."""
    crowded = any(len(rollouts) >= 2 for rollouts in ranking.sigma)
    places = {"positions": ranking.positions, "before": before, "after": after}
    return score_by_order(group, ranking.order if order is None else order, fine_ranked=crowded, **places)


def score_by_rank(group: RolloutGroup, ranks: Mapping[int, Fraction | float], **fields: Any) -> GroupScore:
    """Return the score of a method that gives each answered rollout a rank.

    Args:
        ranks (`Mapping[int, Fraction | float]`):
            From 0 (worst) to `n - 1`, or its mean over several orders.
        more:
            Further fields of [`GroupScore`].
    """
    empty = [rollout.id for rollout in group.empty]  # they share the lowest reward, below all answers
    return GroupScore(rewards_from_ranks(ranks, len(group.rollouts), empty), rank_tiers(ranks), **fields)


def score_by_reward(group: RolloutGroup, rewards: Mapping[int, float | None]) -> GroupScore:
    """Return the score of a method without a buffer. The order is that of the rewards; equal rewards share a tier.

    Args:
        rewards (`Mapping[int, float | None]`):
            The reward of each answered rollout by id, in [-1, 1]; `None` if it is unscored.
    """
    order = rank_tiers({i: reward for i, reward in rewards.items() if reward is not None})
    complete = {**rewards, **dict.fromkeys((rollout.id for rollout in group.empty), -1.0)}
    return GroupScore(tuple(complete[rollout.id] for rollout in group.rollouts), order)


def load_method(name: str, arguments: Mapping[str, Any], seed: int) -> RewardMethod:
    """Return the method that a recipe names, with its arguments.

    Args:
        name (`str`):
            A file of this folder, such as `pairwise_rank`, or the dotted path of a dataclass elsewhere.
        arguments (`Mapping[str, Any]`):
            Each value is checked against the annotation of its field.
        seed (`int`):
            The run's seed, for methods that have an argument `seed`.

    Raises:
        [`SettingsError`]: if there is no such method or argument, a value does not fit, or a member is missing.
    """
    cls = find_method(name)
    method: RewardMethod = cls(**check_arguments(cls, name, arguments, "method_args", {"seed": seed}))
    # A class of a user need not derive from `RewardMethod`.
    missing = [member for member in METHOD_MEMBERS if not hasattr(method, member)]
    if missing or cls.score is RewardMethod.score:
        raise SettingsError(
            f"the reward method {name!r} has no {', '.join(missing or ['score'])}: derive its class from"
            " rankbuffer_trl.rewards._method.RewardMethod, and give it a name and `score`"
        )
    return method


def find_method(name: str) -> type[Any]:
    """Return the dataclass that a recipe's `method` names."""
    if name in REMOVED_METHODS:
        raise SettingsError(
            f"the reward method {name!r} was removed, since two lists train as well with fewer judge tokens: set"
            " `method` to listwise, or go on with commit e122f1a, the last one that has it"
        )
    method, cause = None, "no dataclass has that name"
    try:
        method = load_path(name if "." in name else f"{homes().get(name, __package__)}.METHOD")
    except LookupError as error:
        cause = str(error)
    if isinstance(method, type) and is_dataclass(method):
        return method
    names = method_names()
    raise SettingsError(
        f"there is no reward method {name!r}{near(name, names) or f' ({cause})'}: set `method` to one of"
        f" {', '.join(names)}, or to the dotted path of a dataclass"
    )


def method_names() -> list[str]:
    """Return the names of all methods: of the files that define `METHOD`."""
    return sorted(name for name, home in homes().items() if hasattr(import_module(home), "METHOD"))


def homes() -> dict[str, str]:
    """Return the modules of this folder and of `beyond/`, by the names of their files."""
    folders = [import_module(name) for name in (__package__, f"{__package__}.beyond")]
    return {
        file.name.lstrip("_"): f"{folder.__name__}.{file.name}"  # a recipe names the method, not the private file
        for folder in folders
        for file in iter_modules(folder.__path__)
    }
