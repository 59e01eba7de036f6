"""The paper's tables for runs and their evaluations: our rows, and below them the row of the paper that they repeat.

Scores come from the `results.json` of evaluations, costs from the ledgers of the runs. A score belongs to a run if the
model evaluated was the policy after the run's last step. What is missing is a gap.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rankbuffer_trl.decoding import read_json_as
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import write_whole
from rankbuffer_trl.rewards import load_method
from rankbuffer_trl.store import history

from ..paper import average, number, paper, paper_recipes, paper_rows
from .chart import csv_of
from .runs import Run
from .tables import TableRow

PAPER, MISSING = "the paper", "no run"
HEADS = paper()["columns"]  # by name of the column
# The settings that tell rows of one method apart.
OBJECTIVE = ("loss_type", "scale_rewards", "scale_by_signal", "epsilon_high", "mask_truncated_completions")
MARKS = {"bold": "**{}**", "underline": "<u>{}</u>"}


def read_evaluations(paths: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Read the results of evaluations, each named by its folder or by its `results.json`.

    Raises:
        [`SettingsError`]: if one is no evaluation, or if their scores cannot be compared.
    """
    evaluations = {}
    for path in (path / "results.json" if path.is_dir() else path for path in paths):
        try:
            evaluations[path] = read_json_as(path, dict[str, Any])
        except ValueError as error:
            raise SettingsError(f"{path}: {error}. Name the output_dir of an evaluation") from None
        if missing := {"judge", "limit", "models", "policies"} - evaluations[path].keys():
            raise SettingsError(f"{path} is not the results.json of an evaluation: it has no {min(missing)!r}")
    for key in ("judge", "limit"):  # scores of another judge or limit mean something else
        values = {results[key]: f"{results[key]} in {path}" for path, results in evaluations.items()}
        if len(values) > 1:
            raise SettingsError(f"one table cannot compare evaluations of another {key}: {', '.join(values.values())}")
    return evaluations


def row_of(run: Mapping[str, Any]) -> str | None:
    """Return the row of the paper that a run with this `run.json` repeats, by its method, arguments and objective."""
    config = run.get("config", {})
    for row, recipe in paper_recipes().items():
        same = all((recipe.get(key) or None) == (config.get(key) or None) for key in OBJECTIVE)
        if same and recipe["method"] == run.get("method"):
            # With the defaults that a recipe leaves out.
            method = load_method(recipe["method"], recipe.get("method_args", {}), config.get("seed", 0))
            if asdict(method) == run.get("method_args"):
                return row
    return None


def measured_rows(runs: Sequence[Run], evaluations: Mapping[Path, Any]) -> list[TableRow]:
    """Return a row for each run, and one for each evaluated model that is the policy of none of them.

    Raises:
        [`SettingsError`]: if an evaluation has no model of these runs, or if two have scores of the same run.
    """
    rows: list[TableRow] = []
    started = {Path(run.manifest.get("policy") or "").name for run in runs}
    policies = [(history.run_id(run.store), run.store.last_step()) for run in runs]
    scores_of: dict[tuple, TableRow] = {policy: {} for policy in policies}
    for path, results in evaluations.items():
        matched = False
        for label, policy in results["policies"].items():
            model, trained_by = policy["model"], (policy["run"], policy["step"])
            metrics = results["models"][label].items()
            scores = {name: result["metrics"][result["headline"]]["value"] for name, result in metrics}
            # A model that no run trained, and from which one began.
            base = policy["run"] is None and Path(model).name in started
            matched |= base or trained_by in scores_of
            if trained_by not in scores_of:
                # Another evaluation may have asked for other benchmarks of this model.
                partial = [
                    row for row in rows if row["from"] == model and all(row.get(name) is None for name in scores)
                ]
                for row in partial[:1]:
                    rows.remove(row)
                    scores = row | scores
                rows.append(_row("Base" if base else f"model {model}", model, scores))
            elif twice := scores_of[trained_by].keys() & scores.keys():
                raise SettingsError(f"{path} and another evaluation have scores of {model}: {min(twice)}")
            else:
                scores_of[trained_by] |= scores
        if not matched:
            models = ", ".join(policy["model"] for policy in results["policies"].values())
            problem = f"{path} evaluated {models}, and none of it is the policy after the last step of a run here"
            raise SettingsError(f"{problem}: name the checkpoint that was evaluated, or evaluate the run again")
    for run, policy in zip(runs, policies, strict=True):
        costs, seed = history.totals(run.store), run.manifest.get("seed")
        source = run.name if seed is None else f"{run.name}, seed {seed}"
        row = _row(row_of(run.manifest) or f"run {run.name}", source, scores_of[policy])
        rows.append(row | {"tokens": costs.tokens, "calls": costs.calls})
    return rows


def _row(method: str, source: str, scores: Mapping[str, float | None]) -> TableRow:
    columns = {name: scores.get(name) for name in HEADS}
    return {"method": method, "from": source, **columns, "average": average(scores)}


def beside_the_paper(rows: Sequence[TableRow]) -> list[TableRow]:
    """Return our rows of each method, their mean if there are several, and then the paper's row of that method."""
    table: list[TableRow] = []
    printed = paper_rows()
    for method in dict.fromkeys((*printed, *(row["method"] for row in rows))):
        of_method = [row for row in rows if row["method"] == method] or [_row(method, MISSING, {})]
        table += of_method
        if len(of_method) > 1:
            columns = {name: [row[name] for row in of_method] for name in HEADS}
            # A mean over some runs would not be that of the row.
            means = {name: None if None in values else fmean(values) for name, values in columns.items()}
            table.append({"method": method, "from": f"mean of {len(of_method)}", **means})
        if method in printed:
            table.append(_row(method, PAPER, {}) | printed[method])
    return table


def markdown(table: Sequence[TableRow], notes: Sequence[str]) -> str:
    """Return each table of the paper that has a row of ours, and a table of the other rows, in Markdown."""
    ours = {row["method"] for row in table if row["from"] not in (PAPER, MISSING)}
    rest = {"title": "Not in the paper", "blocks": [sorted(ours - paper_rows().keys())]}
    parts = ["# The paper's tables", *notes]
    for spec in (*paper()["tables"], rest):
        if ours.isdisjoint(chain(*spec["blocks"])):
            continue
        names = spec.get("columns", HEADS)
        lines = [["method", "from", *(HEADS[name] for name in names)], ["---", "---", *["---:"] * len(names)]]
        for methods in spec["blocks"]:
            rows = [row for method in methods for row in table if row["method"] == method]
            marked = marks(rows, spec)
            for i, row in enumerate(rows):
                cells = (marked.get((i, name), "{}").format(format_cell(row[name], name)) for name in names)
                lines.append([row[key].replace("|", "\\|") for key in ("method", "from")] + [*cells])
        parts += [f"## {spec['title']}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts) + "\n"


def marks(rows: Sequence[TableRow], spec: Mapping[str, Any]) -> dict[tuple[int, str], str]:
    """Return how the best numbers of a block are written, by row and column: those of ours and of the paper apart."""
    marked: dict[tuple[int, str], str] = {}
    for theirs in (False, True):
        side = {row["method"]: i for i, row in enumerate(rows) if (row["from"] == PAPER) == theirs}  # a mean is last
        for name in spec.get("marked", ()):
            # As printed, so that equal cells have equal marks.
            values = {i: round(rows[i][name], 2) for i in side.values() if rows[i][name] is not None}
            best = sorted(set(values.values()), reverse=True)[: len(values) - 1]  # the worst of a block has no mark
            for value, mark in zip(best, spec["marks"], strict=False):
                marked |= {(i, name): MARKS[mark] for i in values if values[i] == value}
    return marked


def format_cell(value: float | str | None, column: str) -> str:
    """Format a number as the paper does."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,.0f}" if column in ("tokens", "calls") else f"{value:.2f}"


def notes_on(runs: Sequence[Run], evaluations: Mapping[Path, Any]) -> list[str]:
    """Return what a reader of the tables has to know: policy, data and judges, ours and the paper's."""
    facts = {name: [str(run.manifest.get(name) or "unknown") for run in runs] for name in ("policy", "data", "judge")}
    facts["last step"] = [str(run.store.last_step()) for run in runs]
    facts["judge of the scores"] = [str(results["judge"]) for results in evaluations.values()]
    ours = "; ".join(f"{name} {' and '.join(dict.fromkeys(values))}" for name, values in facts.items())
    notes = [f"Ours: {ours}.", f"The paper: {paper()['setup']}."]
    if any(results["limit"] for results in evaluations.values()):
        notes.insert(0, "**A smoke run: these scores mean nothing.**")
    return notes


def unrounded_rows(table: Sequence[TableRow]) -> list[TableRow]:
    """Return the rows with plain numbers in place of those that the paper rounds."""
    return [row | {name: number(row[name]) for name in HEADS} for row in table]


def write_paper(output: Path, table: Sequence[TableRow], notes: Sequence[str]) -> None:
    """Write `paper.md`, and `paper.csv` and `paper.json` with plain numbers, each row once."""
    rows = unrounded_rows(table)
    data = json.dumps({"notes": notes, "rows": rows}, indent=1)
    for ending, text in {"md": markdown(table, notes), "csv": csv_of(rows), "json": data}.items():
        write_whole(output / f"paper.{ending}", text)
