"""The metrics of a step in the trainer's log, which goes to every tracker of `report_to`."""

from collections import Counter
from collections.abc import Sequence

from ..buffer import SOURCES
from ..groups import RolloutGroup
from ..judge import Call, Totals
from ..ranking import INSERTION_BINS, insertion_bin
from ..rewards._method import GroupScore

PLACEMENT = ("position", "tier")
# Tokens are those of parsed calls, as in the paper; `spent_tokens` are those of all attempts.
SUMS = ("calls", "failures", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens", "spent_tokens")


def step_metrics(
    groups: Sequence[RolloutGroup],
    scores: Sequence[GroupScore],
    calls: Sequence[Call],
    seconds: float = 0.0,
    hidden: float = 0.0,
    update: bool = True,
) -> dict[str, float]:
    """Return the metrics of one generation step, by name.

    `buffer/*` are means per query over the groups of the step, and missing if none has a buffer. `insert/*` is the
    histogram of insertion positions, as shares: `below` and `above` all anchors, and the quarters of the intervals
    between them. It is missing if nothing was inserted. `judge/*` are sums over the step.

    Args:
        calls (`Sequence[Call]`):
            Every judgment that was asked for.
        seconds (`float`, *optional*, defaults to `0.0`):
            Wall time that the trainer waited for the judge.
        hidden (`float`, *optional*, defaults to `0.0`):
            Share of `calls`, in 0..1, that had ended before it waited.
        update (`bool`, *optional*, defaults to `True`):
            Whether the buffers are updated, as in training.
    """
    totals = Totals.of(calls)
    # After their update; an evaluation updates nothing.
    buffers = [buffer for score in scores if (buffer := score.after if update else score.before)]
    sources = Counter(anchor.source for buffer in buffers for anchor in buffer.anchors)
    bins = Counter(
        insertion_bin(position, len(score.before))
        for score in scores
        if score.before
        for position in score.positions.values()
    )
    rewards = [reward for score in scores for reward in score.rewards]
    answers = [[rollout.text for rollout in group.answered] for group in groups]
    # Answers that differ from those before them in their group, and all.
    distinct = sum(len(set(texts)) for texts in answers), sum(map(len, answers))
    sums = {"size": sources.total(), **{source: sources[source] for source in SOURCES}} if buffers else {}
    return {
        **{f"buffer/{name}": number / len(buffers) for name, number in sums.items()},
        **{f"insert/{name}": bins[name] / bins.total() for name in INSERTION_BINS if bins},
        **({"rollouts/distinct": distinct[0] / distinct[1]} if distinct[1] else {}),
        "rank/fine_ranked_groups": sum(score.fine_ranked for score in scores) / len(scores),
        "rank/ties": sum(tied_share(score) for score in scores) / len(scores),
        "rank/unscored": sum(reward is None for reward in rewards) / len(rewards),
        "rank/empty": sum(len(group.empty) for group in groups) / len(rewards),
        **{f"judge/{name}": getattr(totals, name) for name in SUMS},
        "judge/seconds": seconds,
        "judge/hidden": hidden,
    }


def placement_columns(scores: Sequence[GroupScore]) -> dict[str, list]:
    """Return the columns that TRL's table of completions gets, one value per rollout of all groups in order."""
    columns: dict[str, list] = {name: [] for name in PLACEMENT}
    for score in scores:
        tiers = {id: tier for tier, ids in enumerate(score.order) for id in ids}
        for id in range(len(score.rewards)):
            columns["position"].append(score.positions.get(id))  # 0..K, `None` without a coarse ranking
            columns["tier"].append(tiers.get(id))  # from 0, the worst; `None` outside the order
    return columns


def tied_share(score: GroupScore) -> float:
    counts = Counter(reward for reward in score.rewards if reward is not None)
    # Of all rewards, also those that are missing.
    return sum(count for count in counts.values() if count > 1) / len(score.rewards)
