"""WildBench v2's result files, in the official format, and what they say of a model."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankbuffer_trl.judge.verdicts import VerdictError

from .benchmark import OutputError, Scores
from .dropped import check_rows
from .files import read_json
from .metric import Row, Rows
from .wildbench_prompts import rating
from .wildbench_scores import (
    GROUPS,
    REWARDS,
    Judged,
    group_rows,
    is_whole,
    macro_rows,
    plain_rows,
    spread,
    together,
)


def score_row(session: str, model: str, response: str, verdict: Mapping[str, Any]) -> dict[str, Any]:
    """A rating as `batch_results_format.py` writes it."""
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
    """A verdict on a pair as `batch_results_format.py` writes it.

    Args:
        session (`str`):
            The conversation.
        names (`Sequence[str]`):
            Who was A, and who was B.
        outputs (`Mapping[str, str]`):
            What the judge saw of each.
        verdict (`Mapping`, *optional*):
            The judge's answer; `None` if the tables do not count it and it was not asked.
    """
    worth = None if verdict is None else REWARDS[verdict["choice"]]
    winner = None if worth is None else names[0] if worth > 0 else names[1] if worth < 0 else "tie"
    return {
        "session_id": session,
        "parsed_result": None if verdict is None else dict(verdict),
        "model_A": names[0],
        "model_B": names[1],
        "winner": winner,
        "extent": None if worth is None else int(2 * abs(worth)),
        "model_outputs": {name: text.strip() for name, text in outputs.items()},
    }


def read_rows(path: Path, expected: Collection[str], dropped: Collection[str] = ()) -> list[dict[str, Any]]:
    """The rows of an official result file.

    Args:
        path (`Path`):
            The file.
        expected (`Collection[str]`):
            All sessions.
        dropped (`Collection[str]`, *optional*):
            Those of them that have no verdict, and so no row.

    Raises:
        [`OutputError`]: if the file is missing, or holds other rows than these.
    """
    try:
        rows = read_json(path)
    except FileNotFoundError:
        raise OutputError(f"{path} is missing: judge the outputs first") from None
    check_rows([row.get("session_id") for row in rows], expected, dropped, path)
    return rows


def score_judged(rows: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, ...]]) -> dict[str, Judged]:
    """Ratings by session.

    Args:
        rows (`Sequence[Mapping]`):
            Of a result file.
        groups (`Mapping[str, tuple[str, ...]]`):
            The groups of tasks of each session.

    Raises:
        [`OutputError`]: at a score that is no number from 1 to 10.
    """
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
    """Rewards by session, of the model that is not `reference`. See [`score_judged`]."""
    judged = {}
    for row in rows:
        whole = all(map(is_whole, row["model_outputs"].values()))
        sign = 0 if not whole or row["winner"] == "tie" else -1 if row["winner"] == reference else 1
        judged[row["session_id"]] = Judged(sign * (row["extent"] or 0) / 2, groups[row["session_id"]], whole)
    return judged


def score_wildbench(
    scored: Mapping[str, Judged], rewards: Mapping[str, Mapping[str, Judged]], conversations: int
) -> Scores:
    """All that verdicts say of a model.

    Args:
        scored (`Mapping[str, Judged]`):
            Ratings by session.
        rewards (`Mapping[str, Mapping[str, Judged]]`):
            Rewards by session, for each reference; empty if they were not judged.
        conversations (`int`):
            How many there are, judged or not.
    """
    rows = {"WB-Score (task macro)": spread_rows(macro_rows(scored)), "WB-Score": spread_rows(plain_rows(scored))}
    rows |= {f"WB-Score: {group}": spread_rows(group_rows(scored, group)) for group in GROUPS}
    counts = {
        "conversations": conversations,
        "ratings dropped": conversations - len(scored),
        "responses that are empty or cut": sum(not row.whole for row in scored.values()),
    }
    if rewards:
        rows["WB-Reward (task macro)"] = percent_rows(together([macro_rows(each) for each in rewards.values()]))
        rows["WB-Reward"] = percent_rows(together([plain_rows(each) for each in rewards.values()]))
        for reference, each in rewards.items():
            rows[f"WB-Reward: {reference}"] = percent_rows(plain_rows(each))
            counts[f"pairs dropped: {reference}"] = conversations - len(each)
            counts[f"pairs with an empty or cut response: {reference}"] = sum(not row.whole for row in each.values())
    return Scores(
        headline="WB-Score (task macro)",
        rows=rows,
        counts=counts,
        notes=(
            "WB-Score is 20 points for each point of a rating above 5. An empty response is rated 1 and no judge is"
            " asked; it counts in the plain score and in no group of tasks.",
            "In WB-Reward a pair with an empty response, or one of more than 1,000 words, is 0 in the plain mean and"
            " counts in no group, whatever the verdict would be; no judge is asked.",
        )[: 2 if rewards else 1],
    )


def spread_rows(rows: Rows) -> Rows:
    """Ratings as points of WB-Score."""
    return {key: Row(spread(row.value) * 10, row.weight) for key, row in rows.items()}


def percent_rows(rows: Rows) -> Rows:
    """Rewards as points of WB-Reward."""
    return {key: Row(row.value * 100, row.weight) for key, row in rows.items()}
