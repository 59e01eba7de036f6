"""Puts a report together: the page, and the charts and tables beside it."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.progress import track

from ..data.queries import DataError, QueryTable
from ..judge.config import JudgeConfig
from ..judge.rubric_judge import score
from .browser import query_pages
from .chart import Chart
from .charts import run_charts
from .collect import advantages, efficiency_table, judge_table, kind_table, quality_table, reward_table
from .comparison import advantage_chart, colour_of, curve_chart, efficiency_chart, score_chart, smoothing
from .history import buffers_by_epoch
from .page import RunSection, browser_index, figure_for, pack, render
from .runs import Run, open_runs

MEASURE = "rubric score"
Quality = Callable[[str, str], float]


def write_report(
    run_dirs: Sequence[str | Path],
    output: str | Path,
    queries: QueryTable | None = None,
    step: int | None = None,
    scores: dict[str, float] | None = None,
    text_limit: int = 4000,
    prices: JudgeConfig | None = None,
) -> Path:
    """Write `index.html`, and a PNG and a CSV file per chart to `charts`, where each of several runs has its folder.

    Args:
        run_dirs (`Sequence[str | Path]`):
            Output folders, checkpoints or store files, see [`open_runs`].
        output (`str` or `Path`):
            The folder to write to.
        queries (`QueryTable`, *optional*):
            The runs' data set. With it the page has prompts and rubrics, and a quality curve: the embedded judge's
            score of every rollout.
        step (`int`, *optional*):
            The step whose advantages are drawn; by default the last one that all runs have.
        scores (`dict[str, float]`, *optional*):
            Scores from elsewhere by name of the run, such as means over benchmarks, to hold against judging cost.
        text_limit (`int`, *optional*, defaults to `4000`):
            Characters of a response that the page keeps.
        prices (`JudgeConfig`, *optional*):
            Its `judge_prompt_price` and `judge_completion_price` say what the judge has cost.

    Returns:
        `Path`: the page.

    Raises:
        [`StoreError`]: if a run cannot be read.
        [`DataError`]: if the data set is not that of the runs.
        `ValueError`: if `step` or a run named in `scores` does not exist.
    """
    output = Path(output)
    with open_runs(run_dirs) as runs:
        quality = None
        if queries is not None:
            quality = cache(rubric_quality(queries))
            for run in runs:
                check_queries(run, queries)
        signals = {run.name: advantages(run.store) for run in runs}
        step = chosen_step(step, signals)
        comparison = comparison_charts(runs, quality, scores or {})
        fixed = advantage_chart({name: steps[step] for name, steps in signals.items()}, step)
        sections = [section_of(run, queries, quality, text_limit, prices or JudgeConfig()) for run in runs]
        lanes = [
            {"name": name, "colour": colour_of(i), "steps": rounded(steps)}
            for i, (name, steps) in enumerate(signals.items())
        ]
        made = f"Made {time.strftime('%Y-%m-%d %H:%M')} from {', '.join(str(run.path) for run in runs)}"
        write(output / "index.html", render(sections, comparison, lanes, step, made).encode("utf-8"))
    write_charts(output / "charts", [*comparison, fixed])
    for number, one in enumerate(sections):
        folder = f"run-{number}" if len(sections) > 1 else ""
        write_charts(output / "charts" / folder, one.charts)
    return output / "index.html"


def write_charts(folder: Path, charts: Sequence[Chart]) -> None:
    """A PNG and a CSV file for each."""
    for chart in charts:
        write(folder / f"{chart.name}.png", chart.png())
        write(folder / f"{chart.name}.csv", chart.csv().encode("utf-8", "replace"))


def write(path: Path, content: bytes) -> None:
    """Write a file whole, so that a page that is open is never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def rubric_quality(queries: QueryTable) -> Quality:
    """The embedded judge's score of a response, 0 to 100."""
    rubrics = cache(lambda query_id: [(rubric.weight, rubric.text) for rubric in queries[query_id].rubrics])
    return lambda query_id, text: 100 * score(text, rubrics(query_id))


def check_queries(run: Run, queries: QueryTable) -> None:
    """Refuse a data set that is not the run's."""
    for (query_id,) in run.store.rows("SELECT DISTINCT query_id FROM groups"):
        if query_id not in queries:
            raise DataError(f"the data set has no query {query_id!r}, which {run.path} was trained on: name that one")


def chosen_step(step: int | None, signals: dict[str, dict]) -> int:
    """The step wanted, or the last that all runs have."""
    shared = set.intersection(*(set(steps) for steps in signals.values()))
    if step is None and shared:
        step = max(shared)
    if step is None or step not in shared:
        have = ", ".join(f"{name} {min(steps)} to {max(steps)}" for name, steps in signals.items())
        what = "the runs have no step in common" if step is None else f"step {step} is not in every run"
        raise ValueError(f"{what}: {have}")
    return step


def rounded(steps: dict[int, list]) -> dict[int, list]:
    """Advantages with three decimals, which is what a picture needs."""
    return {
        step: [[None if value is None else round(value, 3) for value in group] for group in groups]
        for step, groups in steps.items()
    }


def comparison_charts(runs: Sequence[Run], quality: Quality | None, scores: dict[str, float]) -> list[Chart]:
    """Quality and efficiency, as far as there is a measure."""
    charts = []
    if quality:
        curves = {run.name: quality_table(run.store, quality) for run in track_rows(runs, "measuring rollouts")}
        caption = "The embedded judge's score, from 0 to 100, of each rollout that has an answer."
        charts.append(curve_chart("quality", "Quality of the rollouts", caption, MEASURE, curves))
        costs = {
            run.name: efficiency_table(judge_table(run.store), curves[run.name], smoothing(len(curves[run.name])))
            for run in runs
        }
        charts.append(efficiency_chart(costs, MEASURE))
    if scores:
        names = [run.name for run in runs]
        for name in scores:
            if name not in names:
                raise ValueError(f"scores names a run {name!r}, and there is none; the runs are {', '.join(names)}")
        totals = {run.name: run.store.totals() for run in runs}
        charts.append(score_chart(scores, {name: (sums.tokens, sums.calls) for name, sums in totals.items()}))
    return charts


def section_of(
    run: Run, queries: QueryTable | None, quality: Quality | None, text_limit: int, prices: JudgeConfig
) -> RunSection:
    """A run's part of the page."""
    total = next(run.store.rows("SELECT count(DISTINCT query_id) FROM groups"))[0]
    entries, pages = [], []
    for index, page in track_rows(query_pages(run.store, queries, quality, text_limit), run.name, total):
        entries.append(index)
        pages.append(pack(page))
    return RunSection(
        name=run.name,
        facts=facts_of(run, total, prices),
        charts=run_charts(run.store, run.log),
        kinds=kind_table(run.store),
        index=browser_index(run.name, entries, MEASURE if quality else None),
        pages=pages,
    )


def facts_of(run: Run, queries: int, prices: JudgeConfig) -> dict[str, str]:
    """The numbers at the head of a run."""
    rewards, totals, epochs = reward_table(run.store), run.store.totals(), buffers_by_epoch(run.store)
    last = rewards[-1]
    rollouts = sum(row["rollouts"] for row in rewards)
    unscored = sum(row["unscored"] * row["rollouts"] for row in rewards)
    methods = [name for (name,) in run.store.rows("SELECT DISTINCT method FROM calls WHERE phase = 'train'")]
    price = prices.price(totals)
    return {
        "method": ", ".join(methods) or "-",
        "steps so far": f"{len(rewards):,}",
        "newest epoch": str(last["epoch"]),
        "queries visited": f"{queries:,}",
        "rollouts": f"{rollouts:,}",
        "of them without a reward": f"{unscored:,.0f}",
        "anchors per query": f"{epochs[-1].size:.2f}" if epochs else "-",
        f"judge calls, {totals.failures:,} more failed": f"{totals.calls:,}",
        "judge tokens": figure_for(totals.tokens),
        "tokens per rollout": figure_for(totals.tokens / rollouts),
        **({"cost of the judge": f"{price:,.2f}"} if price is not None else {}),
    }


def track_rows(rows: Iterable, title: str, total: int | None = None) -> Iterable:
    """Rows with a progress bar, where somebody looks."""
    console = Console(stderr=True)
    return track(rows, title, total, console=console, transient=True, disable=not console.is_terminal)
