"""Can a few honest reads repair a cheap judge? The runs of `fooled.py` are read again, without training.

    python -m experiments.toy_policy.repair runs/fooled

The runs were made with `--keep_runs`. A share of the rollouts is read twice: by the judge of the run, with its
weakness, and by a reader without one, whose errors are twice as large. The regression of a run with a reader
(`rankbuffer_trl/training/repair.py`) explains the difference of the two readings by four probes and by the words of
the answer, from the reads of all steps before. Its prediction for a step is subtracted from what the judge says of it.
The program prints a table by run and share, and one JSON line:

* `named`: the first step from which the feature with the largest effect was always the one that the judge pays for.
* `explained`: the share of what the weakness adds within a group that the prediction has, from that step or from step
  12 on. 1 is all of it; below 0, the repair does harm.
* `added`: the deviation of the prediction within a group, in deviations of true quality; harm if there is no weakness.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.simulated_judge import World
from experiments.toy_policy.judge import NOISE, READER_NOISE, NoisyRubricJudge, Weakness
from experiments.toy_policy.run import rubrics_of
from rankbuffer_tools.report.runs import open_runs
from rankbuffer_trl.data.queries import load_queries
from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.store import history
from rankbuffer_trl.store.history import ReadRow
from rankbuffer_trl.training.repair import WORD_IS, Correction, features_of
from recipes.quickstart import policy

SHARES = (0.02, 0.05, 0.1)  # of the rollouts that the reader reads
BEGIN = 12  # step by which the feature must be named
PAYS_FOR = {"phrase": {f"{WORD_IS}then"}, "length": {"words"}, "echo": {"rubric_words", "words"}}


class Answer(NamedTuple):
    """A rollout: its step and query, its features, and what the judge and the reader see in it."""

    step: int
    query_id: str
    features: dict[str, float]
    liked: float
    cheap: float
    honest: float


def answers_of(run: Path, judge: NoisyRubricJudge, seed: int = 0) -> list[Answer]:
    """Return the rollouts of a run in the order of its steps."""
    queries, plain, random = (
        load_queries(str(policy.DATA)),
        NoisyRubricJudge(judge.mean, judge.deviation),
        Random(seed),
    )
    rubrics, found = rubrics_of(queries), []
    with open_runs([run]) as (opened,):
        for id in history.query_ids(opened.store):
            asked = [Rubric(text, weight) for weight, text in rubrics[id]]
            for response in history.responses(opened.store, id):
                if response.initial:
                    continue
                true, cheap = (each.worth(response.text, rubrics[id]) for each in (plain, judge))
                seen = cheap + random.gauss(0, NOISE), true + random.gauss(0, READER_NOISE)
                features = features_of(response.text, asked)
                found.append(Answer(response.step, id, features, cheap - true, *seen))
    return sorted(found, key=lambda each: (each.step, each.query_id))


def centred(answers: Sequence[Answer], values: np.ndarray) -> np.ndarray:
    """Return values less the mean of their group."""
    groups = np.unique([f"{each.step} {each.query_id}" for each in answers], return_inverse=True)[1]
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]


def study(answers: Sequence[Answer], share: float, weakness: str, seed: int = 0) -> dict[str, float | int | None]:
    """Repair each step of a run by the reads of all steps before it."""
    random, steps = Random(f"{seed} {share}"), sorted({each.step for each in answers})
    read: list[Answer] = []
    liked, predicted, named = [], [], None
    for step in steps:
        here = [each for each in answers if each.step == step]
        if len(read) > 5:
            repair = Correction([ReadRow("", 0, i, a.cheap - a.honest, a.features) for i, a in enumerate(read)], 1)
            right = repair.named in PAYS_FOR.get(weakness, set())
            named = (step if named is None else named) if right else None
            if step >= BEGIN:
                liked.append(centred(here, np.array([each.liked for each in here])))
                predicted.append(centred(here, repair.predict(each.features for each in here)))
        read += [each for each in here if random.random() < share]
    true, guess = np.concatenate(liked), np.concatenate(predicted)
    explained = 1 - float(((true - guess) ** 2).sum() / (true**2).sum()) if true.any() else None
    return {"named": named, "explained": explained, "added": float(np.sqrt((guess**2).mean())) / World.within}


def studies(folder: Path) -> Iterator[dict]:
    """Yield a row for each run that was kept, and each share."""
    for path in sorted(folder.glob("*/settings.json")):
        made = json.loads(path.read_text())
        weakness = Weakness.of(made["weakness"], made["strength"], made["trait"])
        judge = NoisyRubricJudge(made["mean"], made["deviation"], NOISE, weakness=weakness)
        for run in sorted((path.parent / "runs").iterdir()):
            answers = answers_of(run, judge)
            for share in SHARES:
                found = study(answers, share, made["weakness"])
                yield {"judge": path.parent.name, "run": run.name, "share": share, **found}


def main() -> None:
    """Print the table of the studies, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the comparisons, as for `fooled.py`")
    rows = list(studies(parser.parse_args().folder))
    table = Table("judge", "run", "read", "named at step", "explained", "added")
    for row in rows:
        explained = "" if row["explained"] is None else f"{row['explained']:.2f}"
        named = "never" if row["named"] is None else str(row["named"])
        table.add_row(row["judge"], row["run"], f"{row['share']:.0%}", named, explained, f"{row['added']:.2f}")
    Console().print(table)
    print(json.dumps({"benchmark": "toy_policy_repair", "rows": rows}))


if __name__ == "__main__":
    main()
