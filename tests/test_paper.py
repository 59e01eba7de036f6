"""The paper's tables, from runs with real stores and manifests and from results as an evaluation writes them."""

import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers.runs import record
from helpers.scripted import config

from evaluation.benchmark import BenchmarkScores
from evaluation.metric import Row
from evaluation.results import EvaluationReport, ModelResult
from evaluation.run import policy_of
from rankbuffer_tools.batch.recipes import read_recipe
from rankbuffer_tools.paper import PAPER_BENCHMARKS, RECIPE_FOLDER, average, paper_recipes, paper_rows
from rankbuffer_tools.report import paper
from rankbuffer_tools.report.report import comparison_charts
from rankbuffer_tools.report.runs import open_runs
from rankbuffer_trl.checkpointing._checkpoint import describe, write_manifest
from rankbuffer_trl.checkpointing.manifest import FOLDER
from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.judge import Totals
from rankbuffer_trl.rewards._method import load_method
from rankbuffer_trl.store import BufferStore
from rankbuffer_trl.store._places import LIVE_STORE, SAVED


def manifest(folder: Path, recipe: dict, seed: int = 1) -> dict:
    """What `run.json` says of a run with the method and the objective of a recipe."""
    settings = config(folder, seed=seed, **{key: recipe[key] for key in recipe if key in ("method", *paper.OBJECTIVE)})
    method = asdict(load_method(settings.method, recipe.get("method_args", {}), seed))
    names = {"policy": "Qwen3-8B", "data": "nectar", "judge": "small", "seed": seed, "processes": 1}
    return describe(names | {"method": settings.method, "method_args": method}, 1, settings)


def finish(folder: Path, row: str, seed: int) -> tuple[int, int]:
    """Make a finished run of as many epochs as its seed; return its judge tokens and calls, counted one by one."""
    found = manifest(folder, paper_recipes()[row], seed)
    run = record(folder / LIVE_STORE, seed, method=load_method(found["method"], found["method_args"], seed))
    store = BufferStore(run.path)
    store.save(folder / FOLDER)
    store.close()
    write_manifest(folder, found, SAVED, {})
    parsed = [call for _, call in run.calls if call.outcome == "parsed"]
    return sum(call.usage.prompt + call.usage.completion for call in parsed), len(parsed)


def evaluated(path: Path, judge: str = "big", limit: int | None = None, **models: tuple[str | Path, list]) -> Path:
    """Write `results.json` as an evaluation does: by label a model, and its scores of the first benchmarks."""
    results = {}
    for label, (_, scores) in models.items():
        for name, score in zip(PAPER_BENCHMARKS, scores, strict=False):
            found = BenchmarkScores("main", {"other": {}, "main": {"id": Row(score)}}, {})
            results.setdefault(label, {})[name] = ModelResult(found, Totals(), None)
    report = EvaluationReport(results, dict.fromkeys(PAPER_BENCHMARKS, "title"), judge, limit)
    policies = {label: policy_of(str(model)) for label, (model, _) in models.items()}
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps({"policies": policies, **report.as_dict()}))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, tuple[int, int]]]:
    """A folder with two runs of RankBuffer and one of GRPO; and the costs of each."""
    folder = tmp_path_factory.mktemp("runs")
    rows = {"first": ("RankBuffer", 1), "second": ("RankBuffer", 2), "grpo": ("GRPO", 1)}
    return folder, {name: finish(folder / name, *each) for name, each in rows.items()}


def test_paper_rows_are_told_apart_by_their_recipes_and_have_the_mean_of_their_scores(tmp_path):
    files = {path.stem: read_recipe(path) for path in (RECIPE_FOLDER / "paper").glob("*.yaml")}
    found = {Path(recipe["output_dir"]).name: recipe for recipe in paper_recipes().values()}
    assert found == {name: recipe | {"base": "base.yaml"} for name, recipe in files.items()}
    for row, recipe in paper_recipes().items():
        assert paper.row_of(manifest(tmp_path, recipe)) == row
    objective = {"scale_rewards": "none", "loss_type": "grpo", "epsilon_high": 0.3}
    objective |= {"mask_truncated_completions": True}
    ours = [{"method": "listwise"}, {"method_args": {"k0": 5}}, {"scale_rewards": "none", "scale_by_signal": True}]
    for change in (*ours, *({key: value} for key, value in objective.items())):
        assert paper.row_of(manifest(tmp_path, files["rankbuffer"] | {"method_args": {}} | change)) is None, change
    printed = {row: each["average"] for row, each in paper_rows().items() if "average" in each}
    off = [row for row, mean in printed.items() if abs(average(paper_rows()[row]) - mean) > 0.00501]
    assert off == ["Dr. GRPO"], "its four scores have the mean 45.685, and the paper prints 45.60"


def test_measured_rows_put_the_benchmarks_of_a_base_model_together(runs, tmp_path):
    paths = [evaluated(tmp_path / name, base=("Qwen3-8B", [10.0, 20.0, 30.0, 40.0])) for name in "ab"]
    results = paper.read_evaluations(paths)
    for found, names in zip(results.values(), (PAPER_BENCHMARKS[:1], PAPER_BENCHMARKS[1:]), strict=True):
        found["models"]["base"] = {name: found["models"]["base"][name] for name in names}
    with open_runs([runs[0] / "grpo"]) as opened:
        rows = paper.measured_rows(opened, results)
    assert [row["average"] for row in rows if row["method"] == "Base"] == [25.0]


def test_write_paper_puts_our_rows_above_the_papers(runs, run, tmp_path):
    folder, costs = runs
    first, second, grpo = [80.0, 30.0, 50.0, 60.0], [90.0, 20.0, 50.0], [70.0, 10.004, 55.0, 65.0]
    base, stranger = [10.0, 10.0, 40.0, 64.0], folder / "first" / "old"
    paths = [
        evaluated(tmp_path / "1", limit=5, rb=(folder / "first", first), base=("/models/Qwen3-8B", base)),
        evaluated(tmp_path / "2", limit=5, rb=(folder / "second", second), grpo=(folder / "grpo", grpo)),
        evaluated(tmp_path / "3", limit=5, rb=(stranger, [1.0]), base=("Qwen3-8B", base)) / "results.json",
    ]
    with open_runs([*(folder / name for name in costs), run.path]) as opened:
        results = paper.read_evaluations(paths)
        table, notes = paper.beside_the_paper(paper.measured_rows(opened, results)), paper.notes_on(opened, results)
        [chart] = comparison_charts(opened, None, table)
        assert paper.notes_on(opened, {})[0].startswith("Ours: ")
    paper.write_paper(tmp_path, table, notes)

    assert notes[0] == "**A smoke run: these scores mean nothing.**"
    known = "policy Qwen3-8B and unknown; data nectar and unknown; judge small and unknown; last step 1 and 3 and 7"
    assert notes[1] == f"Ours: {known}; judge of the scores big."
    found = json.loads((tmp_path / "paper.json").read_text())["rows"]
    with open(tmp_path / "paper.csv", newline="") as file:
        assert [*csv.DictReader(file)] == [{k: "" if v is None else str(v) for k, v in row.items()} for row in found]
    numbers = {(method, source): values for method, source, *values in (row.values() for row in found)}
    assert numbers["RankBuffer", "first, seed 1"] == [*first, sum(first) / 4, *costs["first"]]
    assert numbers["RankBuffer", "second, seed 2"] == [*second, None, None, *costs["second"]]
    assert numbers["RankBuffer", "mean of 2"][6] == (costs["first"][1] + costs["second"][1]) / 2
    assert numbers["RankBuffer, K0=2", "the paper"][4:] == [56.1, 79_300_000, 36_400]
    assert numbers["Base", "mean of 2"] == [*base, 31.0, None, None]

    # The best of ours and of the paper's are marked as in the paper; a mean stands for its runs.
    lines = (tmp_path / "paper.md").read_text().splitlines()
    for line in (
        "| method | from | AE2 | AH-v2 | WB-v2 | WrB |",
        "| Base | mean of 2 | 10.00 | <u>10.00</u> | 40.00 | 64.00 |",
        "| GRPO | grpo, seed 1 | <u>70.00</u> | <u>10.00</u> | **55.00** | **65.00** |",
        "| DAPO | the paper | <u>74.22</u> | 26.60 | <u>46.83</u> | <u>66.13</u> |",
        "| RankBuffer | first, seed 1 | 80.00 | 30.00 | 50.00 | 60.00 |",
        "| RankBuffer | mean of 2 | **85.00** | **25.00** | <u>50.00</u> | - |",
        "| RankBuffer | the paper | 82.80 | 30.20 | 48.79 | 67.27 | **57.27** | 88,818,250 | 36,861 |",
        "| RankBuffer, K0=2 | no run | - | - | - | - | - | - | - |",
        "| RankBuffer, K0=2 | the paper | 80.99 | 30.00 | 46.73 | 66.69 | 56.10 | 79.3M | 36.4K |",
        "| GRPO | grpo, seed 1 | 70.00 | 10.00 | 55.00 | 65.00 | 50.00 | {:,} | {:,} |".format(*costs["grpo"]),
        f"| model {stranger} | {stranger} | 1.00 | - | - | - | - | - | - |",
    ):
        assert line in lines, line
    assert len(lines) - lines.index("## Not in the paper") == 6
    assert lines[-1].startswith("| run live.sqlite | live.sqlite | - |")
    alone = paper.markdown(paper.beside_the_paper([row for row in table if row["from"] == "grpo, seed 1"]), [])
    titles = [line[3:] for line in alone.splitlines() if line.startswith("## ")]
    assert titles == [paper.paper()["tables"][place]["title"] for place in (0, -1)]

    # The figure has what has an average and a cost.
    drawn = [(row["method"], row["from"]) for row in chart.table]
    assert drawn[:2] == [("GRPO", "grpo, seed 1"), ("RankBuffer", "first, seed 1")] and len(drawn) == 2 + 21
    assert chart.png().startswith(b"\x89PNG")


def test_measure_and_read_evaluations_refuse_what_cannot_stand_in_one_table(runs, tmp_path):
    folder, _ = runs
    first = evaluated(tmp_path / "first", rb=(folder / "first", [1.0]))
    for what, value in {"judge": "small", "limit": 3}.items():
        other = evaluated(tmp_path / what, rb=("b", [1.0]), **{what: value})
        with pytest.raises(SettingsError, match=f"of another {what}: .* in .*first/results.json, {value} in .*{what}"):
            paper.read_evaluations([first, other])
    with pytest.raises(SettingsError, match=r"results\.json is missing\. Name"):
        paper.read_evaluations([tmp_path])
    (tmp_path / "results.json").write_text('{"judge": "j", "limit": null, "models": {}}')
    with pytest.raises(SettingsError, match="no 'policies'"):
        paper.read_evaluations([tmp_path])
    again = evaluated(tmp_path / "again", rb=(folder / "first", [2.0, 3.0]))
    finish(tmp_path / "run", "RankBuffer", 2)  # with the last step of the second run
    anew = evaluated(tmp_path / "anew", rb=(tmp_path / "run", [2.0]), x=("me/hub", [1.0]))
    early = evaluated(tmp_path / "early", rb=(folder / "second", [1.0]))
    (early / "results.json").write_text((early / "results.json").read_text().replace('"step": 3', '"step": 2'))
    for path, message in (
        (again, r"again/results\.json and another evaluation have scores of .*/first: alpaca_eval"),
        (anew, "anew/results.json evaluated .*/run, me/hub, and none of it is the policy after the last step"),
        (early, "early/results.json evaluated .*/second, and none of it"),
    ):
        with open_runs([folder / "first", folder / "second"]) as opened, pytest.raises(SettingsError, match=message):
            paper.measured_rows(opened, paper.read_evaluations([first, path]))
