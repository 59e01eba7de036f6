"""WildBench v2's result files and arithmetic, as in its official `leaderboard/data_dir/_create_tables.py`.

WB-Score maps a rating from 1..10 to -80..100. WB-Reward is a verdict against a reference model, from -1 to 1. Both are
reported as a plain mean over all judged rows, and as a weighted mean over five groups of tasks: the task macro. A row
counts once in every group that one of its tags belongs to. Rows without a whole response count in no group.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge import VerdictError, shorten_json

from ..benchmark import BenchmarkScores, OutputError
from ..files import check_rows, read_json
from ..metric import Row, Rows

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
"""The reward of A for each verdict."""

RATINGS = (1, 10)
EMPTY = "[This model response is empty.]"
CUT = "... (truncated)"


@dataclass(frozen=True)
class Judged:
    """A response with its rating or reward."""

    value: float  # a rating, 1 to 10, or a reward, -1 to 1
    groups: tuple[str, ...]  # the groups of tasks in which it counts
    whole: bool  # whether the official tables count the verdict, see `is_whole`


def groups_of(tags: Iterable[str]) -> tuple[str, ...]:
    """Return the groups of a row's tags, each once. An unknown tag is a `ValueError`."""
    tags = list(tags)
    unknown = [tag for tag in tags if tag not in GROUP_OF]
    if unknown:
        raise ValueError(f"the tag {unknown[0]!r} is none of WildBench v2's: {', '.join(GROUP_OF)}")
    return tuple(dict.fromkeys(GROUP_OF[tag] for tag in tags))


def cut_words(text: str, max_words: int) -> str:
    """Cut `text` after `max_words` words, with a note if it has more."""
    words = text.split(" ")  # as officially: newlines separate no words
    return " ".join(words[:max_words]) + CUT if len(words) > max_words else text


def is_whole(response: str) -> bool:
    """Return whether the judge saw a response that is neither empty nor cut. The tables count only such verdicts."""
    response = response.strip()
    return response not in ("", EMPTY) and not response.endswith(CUT)


def plain_rows(judged: Mapping[str, Judged]) -> Rows:
    """Return the rows of the plain metric, by session."""
    return {key: Row(row.value) for key, row in judged.items()}


def macro_rows(judged: Mapping[str, Judged]) -> Rows:
    """Return the rows of the task macro. Their weighted mean is the weighted mean of the groups' means."""
    # A group without rows has no part, while the official tables count it as 0.
    sizes = Counter(group for row in judged.values() if row.whole for group in row.groups)
    return {
        key: Row(row.value, sum(GROUP_WEIGHTS[group] / sizes[group] for group in row.groups))
        for key, row in judged.items()
        if row.whole and row.groups
    }


def group_rows(judged: Mapping[str, Judged], group: str) -> Rows:
    """Return the rows of one group's mean."""
    return {key: Row(row.value) for key, row in judged.items() if row.whole and group in row.groups}


def together(metrics: Sequence[Rows]) -> Rows:
    """Return rows whose weighted mean is the plain mean of `metrics`."""
    shares: dict[str, list[Row]] = {}
    for rows in metrics:
        total = sum(row.weight for row in rows.values())
        for key, row in rows.items():
            # Each metric weighs 1 in all, whatever its number of rows.
            shares.setdefault(key, []).append(Row(row.value, row.weight / total))
    return {
        key: Row(sum(row.value * row.weight for row in parts) / weight, weight)
        for key, parts in shares.items()
        if (weight := sum(row.weight for row in parts))
    }


def rating(verdict: Mapping[str, Any]) -> float:
    """Return the rating in a judge's answer: `"7"`, `7` or `7.5`. Else raise [`VerdictError`]."""
    score = verdict["score"]
    try:
        # The official tables too convert by `float`, which takes true for 1.
        value = math.nan if isinstance(score, bool) else float(score)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not RATINGS[0] <= value <= RATINGS[1]:  # also refuses NaN
        raise VerdictError(f"`score` must be a number from 1 to 10, not {shorten_json(score)}")
    return value


def score_row(session: str, model: str, response: str, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a rating as `batch_results_format.py` writes it."""
    return {
        "session_id": session,
        "parsed_result": dict(verdict),
        "model_test": model,
        "score": verdict["score"],
        "model_output": response.strip(),
    }


def pairwise_row(
    session: str, names: Sequence[str], outputs: Mapping[str, str], verdict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the row of a pair as `batch_results_format.py` writes it. `names` are those of A and B."""
    # A pair that the tables do not count was not judged.
    worth = None if verdict is None else REWARDS[verdict["choice"]]
    winner = None if worth is None else names[0] if worth > 0 else names[1] if worth < 0 else "tie"
    return {
        "session_id": session,
        "parsed_result": None if verdict is None else dict(verdict),
        "model_A": names[0],
        "model_B": names[1],
        "winner": winner,
        # The official scale: 2 much better, 1 better, 0 a tie.
        "extent": None if worth is None else int(2 * abs(worth)),
        "model_outputs": {name: text.strip() for name, text in outputs.items()},
    }


def read_rows(path: Path, expected: Collection[str], dropped: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of an official result file.

    Args:
        dropped (`Collection[str]`, *optional*):
            Sessions whose judgment failed, so that they have no row.

    Raises:
        [`OutputError`]: if the file is missing or has other rows.
    """
    try:
        rows = read_json(path)
    except FileNotFoundError:
        raise OutputError(f"{path} is missing: judge the outputs first") from None
    check_rows([row.get("session_id") for row in rows], expected, dropped, path)
    return rows


def score_judged(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Judged]:
    """Return the ratings by session. A score that is no number from 1 to 10 is an [`OutputError`]."""
    try:
        return {
            row["session_id"]: Judged(rating(row), groups[row["session_id"]], is_whole(row["model_output"]))
            for row in rows
        }
    except VerdictError as fault:
        raise OutputError(f"a result file holds a row that no judge could have given: {fault}") from None


def reward_judged(
    rows: Sequence[Mapping[str, Any]], reference: str, groups: Mapping[str, tuple[str, ...]]
) -> dict[str, Judged]:
    """Return the rewards by session of the model that is not `reference`. See [`score_judged`]."""
    judged = {}
    for row in rows:
        whole = all(map(is_whole, row["model_outputs"].values()))
        # Not whole: it was not judged, and is a tie.
        sign = 0 if not whole or row["winner"] == "tie" else -1 if row["winner"] == reference else 1
        judged[row["session_id"]] = Judged(sign * (row["extent"] or 0) / 2, groups[row["session_id"]], whole)
    return judged


def score_wildbench(
    scored: Mapping[str, Judged], rewards: Mapping[str, Mapping[str, Judged]], conversations: int
) -> BenchmarkScores:
    """Return all metrics and counts of a model. `rewards` are by reference, empty if WB-Reward was not judged."""
    counts = {
        "conversations": conversations,
        "ratings dropped": conversations - len(scored),
        "responses that are empty or cut": sum(not row.whole for row in scored.values()),
    }
    for reference, rows in rewards.items():
        counts[f"pairs dropped: {reference}"] = conversations - len(rows)
        counts[f"pairs with an empty or cut response: {reference}"] = sum(not row.whole for row in rows.values())

    # A weight in a task macro depends on the group's other rows.
    def among(sessions: Collection[str]) -> dict[str, Rows]:
        of_score, *of_rewards = (
            {key: row for key, row in judged.items() if key in sessions} for judged in (scored, *rewards.values())
        )
        return metric_rows(of_score, dict(zip(rewards, of_rewards, strict=True)))

    return BenchmarkScores(
        headline="WB-Score (task macro)",
        rows=metric_rows(scored, rewards),
        counts=counts,
        notes=(
            "WB-Score is 20 points for each point of a rating above 5. An empty response is rated 1 without a judge."
            " It counts in the plain score and in no group of tasks.",
            "In WB-Reward a pair with an empty response, or one of more than 1,000 words, is not judged. It is 0 in"
            " the plain mean and counts in no group.",
        )[: 2 if rewards else 1],
        among=among,
    )


def metric_rows(scored: Mapping[str, Judged], rewards: Mapping[str, Mapping[str, Judged]]) -> dict[str, Rows]:
    """Return the rows of all metrics."""
    rows = {"WB-Score (task macro)": score_rows(macro_rows(scored)), "WB-Score": score_rows(plain_rows(scored))}
    rows |= {f"WB-Score: {group}": score_rows(group_rows(scored, group)) for group in GROUPS}
    if rewards:
        rows["WB-Reward (task macro)"] = percent_rows(together([macro_rows(judged) for judged in rewards.values()]))
        rows["WB-Reward"] = percent_rows(together([plain_rows(judged) for judged in rewards.values()]))
        rows |= {f"WB-Reward: {reference}": percent_rows(plain_rows(judged)) for reference, judged in rewards.items()}
    return rows


def score_rows(rows: Rows) -> Rows:
    """Return ratings as points of WB-Score: 5 is 0, and 10 is 100."""
    return {key: Row((row.value - 5) * 20, row.weight) for key, row in rows.items()}


def percent_rows(rows: Rows) -> Rows:
    """Return rewards in per cent, as WB-Reward is reported."""
    return {key: Row(row.value * 100, row.weight) for key, row in rows.items()}
