"""WildBench: its published tables from its published verdicts, counts and group means."""

import ast
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ..assets import Assets
from ..files import read_json
from ..metric import mean as mean_of_rows
from ..wildbench_data import read_conversations
from ..wildbench_results import score_judged
from ..wildbench_scores import (
    GROUP_OF,
    Judged,
    group_rewards,
    group_scores,
    macro,
    mean,
    plain_reward,
    plain_rows,
    plain_score,
    together,
)
from .check import Check, worst
from .wildbench_scripts import script_checks

MANIFEST = Path(__file__).with_name("assets.yaml")
RESULTS = "WildBench/eval_results/v2.0625/score.v2/eval=gpt-4o-2024-05-13"
REFERENCES = ("gpt4t", "haiku", "llama")
WORTH = {"win_much": 1.0, "win": 0.5, "tie": 0.0, "lose": -0.5, "lose_much": -1.0}
ROUNDING = 1e-9


def checks(assets: Assets) -> Iterator[Check]:
    """All comparisons for which the files are there.

    Raises:
        [`AssetError`]: if an official table is missing or another one.
    """
    official = Assets(assets.folder, MANIFEST)
    tables = {name: read_json(official.path("wildbench", name)) for name in ("all_stat", "score", *REFERENCES)}
    yield from published_scores(assets, tables["all_stat"])
    yield worst(
        "task macro from the table's group means",
        {
            model: (macro(row["task_categorized_scores"]) * 10, tables["all_stat"][model]["WB_score.task_macro"])
            for model, row in tables["score"].items()
        },
    )
    rewards = {name: {model: from_counts(row) for model, row in tables[name].items()} for name in REFERENCES}
    for name in REFERENCES:
        yield from published_rewards(name, tables[name], rewards[name])
    yield worst(
        "WB-Reward, mean of the three references",
        {
            model: (
                100 * mean_of_rows(together([plain_rows(rewards[name][model]) for name in REFERENCES])),
                row["mixture_of_rewards.K=-1"],
            )
            for model, row in tables["all_stat"].items()
            if all(model in rewards[name] for name in REFERENCES)
        },
        ROUNDING,
    )
    theirs = tag_groups(official.path("wildbench", "create_tables"))
    alike = sum(GROUP_OF.get(tag) == group for tag, group in theirs.items())
    yield Check("tags in the group of the official script", alike, len(theirs | GROUP_OF))
    yield from script_checks(assets, official)


def published_scores(assets: Assets, table: Mapping[str, Any]) -> Iterator[Check]:
    """WB-Score of each model whose verdicts are in the checkout and whose row is in the table."""
    groups = None
    if has(assets, "questions"):
        conversations = read_conversations(assets.path("wildbench", "questions"))
        groups = {session: conversation.groups for session, conversation in conversations.items()}
    for path in sorted((assets.folder / RESULTS).glob("*.json")):
        if (row := table.get(path.stem)) is None:
            continue
        rows = read_json(path)
        judged = score_judged(rows, groups or {each["session_id"]: () for each in rows})
        yield Check(f"WB-Score of {path.stem}", plain_score(list(judged.values())), row["WB_score"])
        lengths = [len(each["model_output"]) for each in rows if judged[each["session_id"]].whole]
        yield Check(f"mean length of {path.stem}", mean(lengths), row["Length"])
        if groups:
            ours = macro(group_scores(judged.values())) * 10
            yield Check(f"WB-Score (task macro) of {path.stem}", ours, row["WB_score.task_macro"], ROUNDING)


def published_rewards(
    name: str, table: Mapping[str, Any], judged: Mapping[str, Mapping[str, Judged]]
) -> Iterator[Check]:
    """WB-Reward and its macro against one reference, from the table's counts of verdicts."""
    yield worst(
        f"WB-Reward against {name} from counts",
        {model: (plain_reward(list(judged[model].values())), row["reward"]) for model, row in table.items()},
    )
    macros = {}
    for model, row in table.items():
        groups = {
            group: group_rewards(from_counts(counts | {"total": sum(counts.values())}, group).values())[group]
            for group, counts in row["task_categorized_results"].items()
        }
        macros[model] = (macro(groups), row["task_macro_reward"])
    yield worst(f"task macro of WB-Reward against {name} from counts", macros)


def from_counts(row: Mapping[str, Any], group: str = "") -> dict[str, Judged]:
    """Judged rows that have the table's counts; those that it skipped are not whole."""
    keys = map(str, count())
    judged = {
        next(keys): Judged(worth, (group,) if group else (), True)
        for outcome, worth in WORTH.items()
        for _ in range(row[outcome])
    }
    return judged | {next(keys): Judged(0.0, (), False) for _ in range(row["total"] - len(judged))}


def tag_groups(script: Path) -> dict[str, str]:
    """The group of each tag in the official script, read without running it."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "task_group_new":
            return ast.literal_eval(node.value)
    raise ValueError(f"{script} has no task_group_new")


def has(assets: Assets, name: str) -> bool:
    """Whether an official file of WildBench is in the folder at all."""
    return any((assets.folder / path).is_file() for path in assets.manifest["wildbench"][name]["path"])
