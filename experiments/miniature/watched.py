"""How soon does a watching reader notice? The runs of `fooled.py` are read as `rankbuffer-rejudge --mode watch` does.

    python -m experiments.miniature.watched runs/fooled

The runs were made with `--keep_runs`. Their judge is asked again, with its weakness. The reader has none, but larger
errors of its own. The runs without a weakness tell how often there is an alarm without a cause. The program prints a
table and one JSON line.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Column, Table

from experiments.miniature.judge import NOISE, NoisyRubricJudge, Reader, Weakness
from experiments.miniature.report import by_method
from experiments.miniature.run import read_results
from rankbuffer_tools.rejudge.config import RejudgeConfig
from rankbuffer_tools.rejudge.watch import Side, ask, next_pairs
from rankbuffer_tools.report.evidence import Watch
from rankbuffer_tools.report.runs import open_runs
from rankbuffer_trl.data.queries import QueryTable, load_queries
from rankbuffer_trl.judge import Judge
from recipes.quickstart import policy

SHARE = 1.0  # of the tokens of a run: so many that pairs do not run out, since delays are counted in pairs
TOLERANCE, FALSE_ALARMS = RejudgeConfig.tolerance, RejudgeConfig.false_alarm_rate


@dataclass(frozen=True)
class InProcess:
    """What a side needs of the settings of a judge that has no server."""

    client: NoisyRubricJudge
    judge_guard: str = "none"
    judge_max_failures: float = 0.25

    def judge(self) -> Judge:
        """Return the judge."""
        return Judge(self.client, guard=self.judge_guard)


def sides_of(folder: Path, queries: QueryTable) -> list[Side]:
    """Return the judge of a comparison and the reader."""
    made = json.loads((folder / "settings.json").read_text())
    weakness = Weakness.of(made["weakness"], made["strength"], made["trait"])
    judge = NoisyRubricJudge(made["mean"], made["deviation"], NOISE, weakness=weakness)
    clients = {"judge": judge, "reader": Reader(made["mean"], made["deviation"])}
    return [Side(name, InProcess(client), rubrics=True, queries=queries) for name, client in clients.items()]


def watch(run: Path, sides: list[Side], share: float) -> Watch:
    """Read a whole run."""
    begun = Watch(run.name, "judge", "reader", True, False, 0, TOLERANCE, FALSE_ALARMS, pairs=[])
    with open_runs([run]) as (opened,):
        while (found := next_pairs(opened.store, sides, begun, share))[0]:
            begun = replace(begun, pairs=begun.pairs + ask(*found[:2], sides, None, defaultdict(list)))
    return begun


def watches(folder: Path, share: float) -> Iterator[tuple[str, str, Watch]]:
    """Yield comparison, method and watch of all runs that were kept."""
    queries = QueryTable(load_queries(str(policy.DATA)))
    for path in sorted(folder.glob("*/settings.json")):
        sides = sides_of(path.parent, queries)
        for method, results in by_method(read_results(path.with_name("results.jsonl"))).items():
            for result in results:
                run = path.parent / "runs" / f"{method}-{result.seed}"
                if run.is_dir():
                    yield path.parent.name, method, watch(run, sides, share)


def main() -> None:
    """Watch all runs, and say how many alarms there were and after how many pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the comparisons none, length-1, and so on")
    parser.add_argument("--share", type=float, default=SHARE, help="tokens of the pairs, as a share of the run's")
    arguments = parser.parse_args()
    found = defaultdict(list)
    for name, method, each in watches(arguments.folder, arguments.share):
        found[name].append(each)
        found[f"{name} {method}"].append(each)
    table = Table("weakness, method", *(Column(name, justify="right") for name in ("runs", "alarms", "pairs", "step")))
    lines = {}
    for name, runs in found.items():
        alarmed = [each for each in runs if each.alarm is not None]
        steps = [each.alarm for each in alarmed]
        waits = [
            next(i for i, row in enumerate(each.rows(), 1) if row["e_value"] >= 1 / FALSE_ALARMS) for each in alarmed
        ]
        table.add_row(
            name, str(len(runs)), str(len(steps)), *(f"{median(of):g}" if of else "-" for of in (waits, steps))
        )
        if name.count(" ") == 0:
            lines[name] = {"runs": len(runs), "alarms": len(steps)}
    table.title = "alarms, and the median of pairs and steps until the alarm"
    Console(highlight=False).print(table)
    print(json.dumps({"benchmark": "watched", **lines}))


if __name__ == "__main__":
    main()
