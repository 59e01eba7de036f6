"""The report: the page, with its charts and tables as files."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import track

from rankbuffer_trl.data import DataError, QueryTable
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import write_whole
from rankbuffer_trl.judge import REFERENCE, RubricJudge, Totals, rubric_score
from rankbuffer_trl.monitoring import progress
from rankbuffer_trl.store import history

from . import tables
from .browser import query_pages
from .chart import POINTS, Chart
from .charts import advantage_chart, curve_chart, efficiency_chart, run_charts, run_colour, score_chart, smoothing
from .page import RunSection, browser_index, format_number, pack, render
from .paper import PAPER, beside_the_paper, measured_rows, notes_on, read_evaluations, unrounded_rows, write_paper
from .progress import above_middle
from .runs import Run, open_runs

MEASURE = "rubric score"
EMBEDDED = (RubricJudge.__name__, RubricJudge.model)  # its name in this process, and as a server
BROWSER_MB = 1.5  # so that a page of 100,000 groups has about 3 MB
MIN_AXIS_END = 2.5  # the least end of the axis of advantages
COLLAPSED = 0.2  # a rise of one of these shares that a reader must see first
REPEATS = {"repeated": "4-grams in the newest answers repeat", "commonest_word": "words are the commonest one"}
Quality = Callable[[str, str], float]
Price = Callable[[Totals], float | None]
Advantages = dict[int, list[list[float | None]]]


def write_report(
    run_dirs: Sequence[str | Path],
    output: str | Path,
    queries: QueryTable | None = None,
    step: int | None = None,
    evaluations: Sequence[Path] = (),
    text_limit: int = 4000,
    price: Price | None = None,
    browser_mb: float = BROWSER_MB,
) -> Path:
    """Write the page `index.html`, and a PNG and a CSV file per chart to the folder `charts`; return the page's path.

    Args:
        queries (`QueryTable`, *optional*):
            The data set of the runs. With it the page has prompts and rubrics, and a quality curve: the embedded
            judge's score of every rollout.
        step (`int`, *optional*):
            The step whose advantages are drawn, from 0; by default the last one that all runs have.
        evaluations (`Sequence[Path]`, *optional*):
            Output folders of evaluations of these runs. With them the paper's tables are written, too.
        text_limit (`int`, *optional*, defaults to `4000`):
            Number of characters of a response that the page keeps.
        price (`Callable[[Totals], float | None]`, *optional*):
            The cost of the judge's work, such as [`Endpoint.price`].
        browser_mb (`float`, *optional*, defaults to `1.5`):
            Megabytes of queries that the buffer browser of a run may have. Beyond them it has queries drawn at random.

    Raises:
        [`StoreError`]: if a run cannot be read.
        [`DataError`]: if the data set lacks a query of the runs.
        [`SettingsError`]: if `step` does not exist, or an evaluation is not one of these runs.
    """
    output, results = Path(output), read_evaluations(evaluations)
    with open_runs(run_dirs) as runs:
        table = beside_the_paper(measured_rows(runs, results)) if results else []
        notes = notes_on(runs, results)
        quality = None
        if queries is not None:
            quality = cache(rubric_quality(queries))  # curves, headlines and browser score the same texts
            for run in runs:
                check_queries(run, queries)
        steps = {run.name: history.steps(run.store) for run in runs}
        step = chosen_step(step, steps)
        # The slider has as many steps as a curve has points.
        drawn_steps = {step}.union(*(numbers[-POINTS:] for numbers in steps.values()))
        signals = {run.name: tables.advantages(run.store, drawn_steps.intersection(steps[run.name])) for run in runs}
        output.mkdir(parents=True, exist_ok=True)  # before the charts are drawn, which takes longest
        comparison = comparison_charts(runs, quality if all(map(judged_by_rubrics, runs)) else None, table)
        fixed = advantage_chart({name: numbers[step] for name, numbers in signals.items()}, step)
        sections = [section_of(run, queries, quality, text_limit, price, browser_mb) for run in runs]
        if len(runs) == 1 and judged_by_rubrics(runs[0]):  # its curve shows what training moved, so it opens the page
            curve = [chart for chart in comparison if chart.name == "quality"]
            comparison = [chart for chart in comparison if chart not in curve]
            sections = [replace(sections[0], charts=[*curve, *sections[0].charts])]
        made = f"Made {time.strftime('%Y-%m-%d %H:%M')} from {', '.join(str(run.path) for run in runs)}"
        advantages = advantage_data(signals, any({*numbers} - drawn_steps for numbers in steps.values()))
        page = render(sections, comparison, advantages, step, made)
        write_whole(output / "index.html", page)
    if table:
        write_paper(output, table, notes)
    write_charts(output / "charts", [*comparison, fixed])
    for number, section in enumerate(sections):
        folder = f"run-{number}" if len(sections) > 1 else ""  # charts of several runs have equal names
        write_charts(output / "charts" / folder, section.charts)
    return output / "index.html"


def write_charts(folder: Path, charts: Sequence[Chart]) -> None:
    """Write a PNG and a CSV file for each chart."""
    for chart in charts:
        write_whole(folder / f"{chart.name}.png", chart.png())
        write_whole(folder / f"{chart.name}.csv", chart.csv())


def rubric_quality(queries: QueryTable) -> Quality:
    """Return a function that scores a response as the embedded judge does, from 0 to 100."""
    rubrics = cache(lambda query_id: [(rubric.weight, rubric.text) for rubric in queries[query_id].rubrics])
    return lambda query_id, text: 100 * rubric_score(text, rubrics(query_id))


def check_queries(run: Run, queries: QueryTable) -> None:
    """Refuse a data set that lacks a query of the run."""
    for query_id in history.query_ids(run.store):
        if query_id not in queries:
            raise DataError(
                f"the data set has no query {query_id!r}, but {run.path} was trained on it: name the run's data set"
            )


def chosen_step(step: int | None, steps: dict[str, list[int]]) -> int:
    """Return the wanted step, or the last one that all runs have."""
    shared = set.intersection(*(set(numbers) for numbers in steps.values()))
    if step is None and shared:
        step = max(shared)
    if step is None or step not in shared:
        available = ", ".join(f"{name} {numbers[0]} to {numbers[-1]}" for name, numbers in steps.items())
        problem = "the runs have no step in common" if step is None else f"step {step} is not in every run"
        raise SettingsError(f"{problem}: {available}")
    return step


def advantage_data(signals: dict[str, Advantages], left_out: bool = False) -> dict:
    """Return what the page draws as advantages at each step: one row of bins per run."""
    runs = [{at: step_bins(groups) for at, groups in steps.items()} for steps in signals.values()]
    ends = (abs(row["advantage"]) for steps in runs for drawn in steps.values() for row in drawn["bins"])
    return {
        "axis_end": max([MIN_AXIS_END, *ends]),
        # Ranks without ties give every step the same advantages, and a picture that never moves says nothing.
        "constant": all(len(steps) > 1 == len({repr(drawn["bins"]) for drawn in steps.values()}) for steps in runs),
        "left_out": left_out,
        "runs": [
            {"name": name, "colour": run_colour(number), "steps": steps}
            for number, (name, steps) in enumerate(zip(signals, runs, strict=True))
        ],
    }


def step_bins(groups: Sequence[Sequence[float | None]]) -> dict:
    """Return the advantages of one run at one step: its bins, levels in a group, and rollouts that have a reward."""
    rollouts = sum(value is not None for group in groups for value in group)
    return {"bins": tables.advantage_bins(groups), "levels": tables.distinct(groups), "rollouts": rollouts}


def comparison_charts(runs: Sequence[Run], quality: Quality | None, table: Sequence[tables.TableRow]) -> list[Chart]:
    """Draw quality and efficiency if there is a measure, and average scores if the paper's tables have one of ours."""
    charts = []
    if quality:
        curves = {run.name: tables.quality_table(run.store, quality) for run in track_rows(runs, "measuring rollouts")}
        caption = "Score by the embedded judge, from 0 to 100, of each rollout that has an answer."
        charts.append(curve_chart("quality", "Quality of the rollouts", caption, MEASURE, curves))
        costs = {
            run.name: tables.efficiency_table(
                tables.judge_table(run.store), curves[run.name], smoothing(len(curves[run.name]))
            )
            for run in runs
        }
        charts.append(efficiency_chart(costs, MEASURE))
    drawn = [row for row in unrounded_rows(table) if None not in row.values()]
    if ours := [row for row in drawn if row["from"] != PAPER]:
        charts.append(score_chart(ours, [row for row in drawn if row["from"] == PAPER]))
    return charts


def section_of(
    run: Run,
    queries: QueryTable | None,
    quality: Quality | None,
    text_limit: int,
    price: Price | None,
    browser_mb: float,
) -> RunSection:
    """Return the part of the page that shows a run."""
    ids = history.query_ids(run.store)
    own = quality if judged_by_rubrics(run) else None
    examples = examples_of(run, own)
    # Examples first, so that they fit; the rest by a fixed seed.
    drawn = dict.fromkeys([*(example["query"] for example in examples), *random.Random(0).sample(ids, len(ids))])
    entries: dict[str, tuple[dict, str]] = {}
    size = 0
    for index, page in track_rows(query_pages(run.store, queries, own, text_limit, drawn), run.name, len(ids)):
        packed = pack(page)
        size += len(packed) + len(pack(index))
        if entries and size > 1e6 * browser_mb:  # one query at least, however large it is
            break
        entries[index["id"]] = index, packed
    examples = [example for example in examples if example["query"] in entries]
    chosen = [entries[id] for id in ids if id in entries]  # back in the order of first visits
    headlines = headlines_of(run, price, own)
    charts = run_charts(run, lambda id: queries[id].rubrics if queries else ())
    for name, what in REPEATS.items():
        if (shares := probed(charts, name)) and shares[-1] - shares[0] >= COLLAPSED:
            label = f"of the {what}, {shares[0]:.0%} at first: read some before you go on"
            headlines = {label: f"{shares[-1]:.0%}"} | headlines  # a judge may not mind, so no other number shows it
    return RunSection(
        name=run.name,
        headlines=headlines,
        facts=facts_of(run, len(ids)),
        summary=summary_of(run, headlines, charts),
        charts=charts,
        kinds=tables.kind_table(run.store),
        index=browser_index(run.name, [entry for entry, _ in chosen], len(ids), MEASURE if own else None, examples),
        pages=[packed for _, packed in chosen],
    )


def judged_by_rubrics(run: Run) -> bool:
    """Return whether the embedded judge gave the rewards."""
    return run.manifest.get("judge") in EMBEDDED  # another judge's rewards may mean something else than these scores


def headlines_of(run: Run, price: Price | None, quality: Quality | None = None) -> dict[str, str]:
    """Return the numbers that a run's section opens with, by label: score, progress, reach and cost."""
    totals, rewards = history.totals(run.store), run.tables.rewards
    rollouts = sum(row["rollouts"] for row in rewards)
    visits = run.visits
    headlines = {}
    if proof := run.comparison:
        before, after = proof.models
        label = f"of {proof.duels} duels on {Path(proof.dataset).name} won by {after} against {before}"
        headlines[f"{label}; judge: {proof.judge}"] = str(proof.won)
    headlines |= risen(run, rewards, quality) if quality else {}
    since_first = progress.compare_visits(
        (of_query[0], of_query[-1]) for of_query in visits.values() if len(of_query) > 1
    )
    if run.duel:  # duels were asked; the number below is estimated from anchors
        first, last = run.duel.epochs
        label = f"of {run.duel.duels} duels on training prompts won by epoch {last} against epoch {first}"
        headlines[f"{label}; judge: {run.duel.judge}"] = str(run.duel.won)
    elif since_first.probability is not None:
        headlines["the newest responses preferred to those of the first visit"] = str(since_first)
    middle = above_middle(visits)
    ends = [progress.percent(share.share) for share in (middle[0], middle[-1])] if middle else []
    if len(set(ends)) > 1:  # a share that did not move is no headline
        label = f"of the responses above the data set's middle one, epoch {middle[0].epoch} to {middle[-1].epoch}"
        headlines[label] = " to ".join(ends)
    else:
        headlines["responses of the policy judged"] = f"{rollouts:,}"
    cost = price(totals) if price else None
    spent, unit = (
        (format_number(totals.tokens), "judge tokens") if cost is None else (f"{cost:,.2f}", "cost of the judge")
    )
    headlines[f"{unit}; {totals.calls / rollouts:.1f} judgments a response"] = spent
    return headlines


def probed(charts: Sequence[Chart], name: str) -> list[float]:
    """Return a probe of the answers, over the steps of the chart."""
    rows = [row for chart in charts if chart.name == "probes" for row in chart.table]
    return [row[name] for row in rows if row.get(name) is not None]


def summary_of(run: Run, headlines: dict[str, str], charts: Sequence[Chart]) -> dict[str, str]:
    """Return the row of a run in the table of runs, by heading: what was trained, and with what result."""
    label, value = next(iter(headlines.items()))
    spent = [text for name, text in headlines.items() if name.startswith("cost of the judge")]
    words = probed(charts, "words")
    return {
        "method": facts_of(run, 0)["method"].partition(" (")[0],
        "steps": f"{len(run.tables.rewards):,}",
        "judge tokens": format_number(history.totals(run.store).tokens),
        "price": spent[0] if spent else "-",
        "words an answer": f"{words[0]:,.0f} to {words[-1]:,.0f}" if words else "-",
        "headline": f"{value} {label}",
    }


def risen(run: Run, rewards: Sequence[tables.TableRow], quality: Quality) -> dict[str, str]:
    """Return the mean score of the first and of the last epoch, by label."""
    epoch_of = {row["step"]: row["epoch"] for row in rewards}
    scores: dict[int, list[float]] = {}
    for query_id in history.query_ids(run.store):
        for response in history.responses(run.store, query_id):
            if not response.initial and response.step in epoch_of:  # a foreign store may lack it
                scores.setdefault(epoch_of[response.step], []).append(quality(query_id, response.text))
    if not scores:  # no rollout has an answer
        return {}
    first, last = min(scores), max(scores)
    label = f"mean {MEASURE} (0 to 100) of the responses, from epoch {first} to epoch {last}"
    before, after = fmean(scores[first]), fmean(scores[last])
    digits = 0 if abs(after - before) >= 1 else 2
    text = f"{before:.{digits}f} to {after:.{digits}f}" if abs(after - before) >= 0.01 else "no change"
    return {label: text} if first < last else {}  # nothing to compare before the second epoch


def facts_of(run: Run, queries: int) -> dict[str, str]:
    """Return what the table of a run says, by label: what was trained, by what, and how far."""
    rewards, totals, growth = run.tables.rewards, history.totals(run.store), run.growth
    rollouts = sum(row["rollouts"] for row in rewards)
    unscored = sum(row["unscored"] * row["rollouts"] for row in rewards)
    manifest, config = run.manifest, run.manifest.get("config", {})
    arguments = manifest.get("method_args", {})
    argument_text = ", ".join(f"{key} {value}" for key, value in arguments.items())
    methods = ", ".join(method for method in history.totals_by(run.store, "method") if method != REFERENCE)
    rows = {
        "policy": manifest.get("policy"),
        "data": manifest.get("data"),
        "judge": manifest.get("judge"),
        "method": (manifest.get("method") or methods) + (f" ({argument_text})" if argument_text else ""),
        "learning rate": config.get("learning_rate"),
        "responses per query and visit": manifest.get("num_generations"),
        "steps so far": f"{len(rewards):,}, up to epoch {rewards[-1]['epoch']} (counted from 0)",
        "queries visited": f"{queries:,}",
        "responses": f"{rollouts:,}, {unscored:,.0f} of these without a reward",
        "preferred to the visit before": unknown_progress(run) if queries >= progress.WINDOW else None,
        "anchors per query": f"{growth[-1]['anchors']:.2f}" if growth else None,
        "judgments": f"{totals.calls:,}, and {totals.failures:,} that failed",
        "judge tokens": f"{totals.tokens:,}, {totals.tokens / rollouts:,.0f} per response",
    }
    return {label: str(value) for label, value in rows.items() if value is not None}


def unknown_progress(run: Run) -> str | None:
    """Say why the newest epoch is not compared with the visits before; `None` if it is."""
    compared = progress.since_last_visit(run.visits)
    newest = compared[max(compared)] if compared else None
    return str(newest) if newest and newest.probability is None else None


def examples_of(run: Run, quality: Quality | None = None) -> list[dict[str, Any]]:
    """Return which responses to show as examples of before and after, by query id, visits and rollout ids.

    Of a query's first and its last visit it is the response in the middle of the group. There are none if no query was
    visited twice.
    """
    ends = {id: (visits[0], visits[-1]) for id, visits in run.placements.items() if len(visits) > 1}
    # None without anchors at the first visit, as of a method without a buffer.
    placed = {id: pair for id, pair in ends.items() if all(visit.placed for visit in pair)}
    revisited = {id: progress.weigh(*pair) for id, pair in (placed or ends).items()}
    if not revisited:
        return []
    # Without a measure, the rise among the anchors.
    rises = {id: rise_of(run, id, quality) if quality else gain - loss for id, (gain, loss) in revisited.items()}
    ranked, measured = sorted(rises, key=lambda id: (rises[id], id)), "score" if quality else "place among the anchors"
    chosen: dict[str, str] = {}
    for place, description in (
        (len(ranked) // 2, "is in the middle of all"),
        (-1, "is the largest"),
        (0, "is the smallest"),
    ):
        # Few queries: one may be all three.
        rise = f"The query whose rise of the {measured} {description}."
        chosen.setdefault(ranked[place], rise if placed or quality else "One of the queries that were visited twice.")
    return [
        {"query": id, "shown": [(visit, rollout) for visit, _, rollout in middles_of(run, id)], "caption": caption}
        for id, caption in chosen.items()
    ]


def middles_of(run: Run, query_id: str) -> list[tuple[int, int, int]]:
    """Return visit, step and rollout id of the response in the middle of a query's first group and of its last."""
    groups = history.groups(run.store, query_id=query_id)
    middles = []
    for visit in (0, -1):
        order = [id for tier in groups[visit].order for id in tier] or [0]  # a method of your own may give no order
        middles.append((visit, groups[visit].step, order[len(order) // 2]))
    return middles


def rise_of(run: Run, query_id: str, quality: Quality) -> float:
    """Return by how much the score of the response in the middle has risen from the first visit to the last."""
    texts = {response.id: response.text for response in history.responses(run.store, query_id)}
    first, last = (quality(query_id, texts.get(f"{step}-{id}", "")) for _, step, id in middles_of(run, query_id))
    return last - first


def track_rows(rows: Iterable, title: str, total: int | None = None) -> Iterable:
    """Return the rows with a progress bar, if standard error is a terminal."""
    console = Console(stderr=True)
    return track(rows, title, total, console=console, transient=True, disable=not console.is_terminal)
