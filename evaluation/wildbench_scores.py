"""WildBench v2's arithmetic, as its official tables compute it (`leaderboard/data_dir/_create_tables.py`).

WB-Score is a rating from 1 to 10, spread to -80..100. WB-Reward is a verdict against a reference model, -1 to 1.
Both come plain, as a mean over all judged rows, and as a weighted mean over five groups of tasks: the macro. A row
counts in every group that one of its tags belongs to, once. Rows without a whole response count in no group.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .metric import Row, Rows

GROUPS = {
    "Creative Tasks": ("Creative Writing", "Editing", "Brainstorming", "Role playing", "Others"),
    "Planning & Reasoning": ("Planning", "Reasoning"),
    "Math & Data Analysis": ("Math", "Data Analysis"),
    "Information/Advice seeking": ("Information seeking", "Advice seeking"),
    "Coding & Debugging": ("Coding & Debugging",),
}
GROUP_OF = {tag: group for group, tags in GROUPS.items() for tag in tags}
GROUP_WEIGHTS = {
    "Creative Tasks": 0.5,
    "Planning & Reasoning": 1.25,
    "Math & Data Analysis": 1.0,
    "Information/Advice seeking": 0.75,
    "Coding & Debugging": 1.25,
}
REWARDS = {"A++": 1.0, "A+": 0.5, "A=B": 0.0, "B+": -0.5, "B++": -1.0}
"""What a verdict is worth to A."""
EMPTY = "[This model response is empty.]"
CUT = "... (truncated)"


@dataclass(frozen=True)
class Judged:
    """A judged response.

    Args:
        value (`float`):
            The rating, 1 to 10, or the reward, -1 to 1, which is 0 if the row is not whole.
        groups (`tuple[str, ...]`):
            The groups of tasks it counts in.
        whole (`bool`):
            Whether the tables count its verdict, see [`is_whole`].
    """

    value: float
    groups: tuple[str, ...]
    whole: bool


def groups_of(tags: Iterable[str]) -> tuple[str, ...]:
    """The groups of a row's primary and secondary tags, each once.

    Raises:
        `ValueError`: at a tag that WildBench v2 does not have.
    """
    tags = list(tags)
    unknown = [tag for tag in tags if tag not in GROUP_OF]
    if unknown:
        raise ValueError(f"the tag {unknown[0]!r} is none of WildBench v2's: {', '.join(GROUP_OF)}")
    return tuple(dict.fromkeys(GROUP_OF[tag] for tag in tags))


def shorten(text: str, max_words: int) -> str:
    """`text`, cut after `max_words` words with a note if it has more. Words are what single spaces part."""
    words = text.split(" ")
    return " ".join(words[:max_words]) + CUT if len(words) > max_words else text


def is_whole(shown: str) -> bool:
    """Whether the tables count the verdict on a response that the judge saw as `shown`: neither empty nor cut."""
    shown = shown.strip()
    return shown not in ("", EMPTY) and not shown.endswith(CUT)


def plain_score(rows: Sequence[Judged]) -> float:
    """WB-Score: the mean rating of all rows, spread so that 5 is 0 and 10 is 100."""
    return spread(mean([row.value for row in rows])) * 10


def group_scores(rows: Iterable[Judged]) -> dict[str, float]:
    """WB-Score of each group of tasks that has a row, in the order in which they appear, from -8 to 10."""
    return {group: spread(mean(values)) for group, values in by_group(rows).items()}


def plain_reward(rows: Sequence[Judged]) -> float:
    """WB-Reward against one reference. Rows that are not whole are 0, and count in the denominator."""
    return mean([row.value for row in rows])


def group_rewards(rows: Iterable[Judged]) -> dict[str, float]:
    """WB-Reward of each group of tasks that has a row, over whole rows alone."""
    return {group: mean(values) for group, values in by_group(rows).items()}


def macro(groups: Mapping[str, float]) -> float:
    """The weighted mean over groups of tasks. A group without rows counts as 0, as in the tables."""
    return sum(value * GROUP_WEIGHTS[group] for group, value in groups.items()) / sum(GROUP_WEIGHTS.values())


def by_group(rows: Iterable[Judged]) -> dict[str, list[float]]:
    """The values of whole rows by group of tasks."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        for group in row.groups if row.whole else ():
            groups.setdefault(group, []).append(row.value)
    return groups


def spread(rating: float) -> float:
    """A rating from 1..10 on the scale -8..10."""
    return (rating - 5) * 2


def mean(values: Sequence[float]) -> float:
    """The mean, summed from left to right like the tables do, for equality to the last bit."""
    return sum(values) / len(values)


def plain_rows(judged: Mapping[str, Judged]) -> Rows:
    """What each row adds to the plain metric, by its key."""
    return {key: Row(row.value) for key, row in judged.items()}


def macro_rows(judged: Mapping[str, Judged]) -> Rows:
    """What each whole row adds to the macro: its weight is its share of each of its groups' weights.

    Their weighted mean is [`macro`] if every group has a row; else it is that over the groups there are.
    """
    sizes = Counter(group for row in judged.values() if row.whole for group in row.groups)
    return {
        key: Row(row.value, sum(GROUP_WEIGHTS[group] / sizes[group] for group in row.groups))
        for key, row in judged.items()
        if row.whole
    }


def group_rows(judged: Mapping[str, Judged], group: str) -> Rows:
    """What each row adds to one group's mean."""
    return {key: Row(row.value) for key, row in judged.items() if row.whole and group in row.groups}


def together(metrics: Sequence[Rows]) -> Rows:
    """Rows whose weighted mean is the mean of `metrics`, each of which counts the same, however many rows it has."""
    shares: dict[str, list[Row]] = {}
    for rows in metrics:
        total = sum(row.weight for row in rows.values())
        for key, row in rows.items():
            shares.setdefault(key, []).append(Row(row.value, row.weight / total))
    return {
        key: Row(sum(row.value * row.weight for row in parts) / weight, weight)
        for key, parts in shares.items()
        if (weight := sum(row.weight for row in parts))
    }
