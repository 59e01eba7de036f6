"""Ask a real judge about the answers that were kept: an opinion that no run was paid for.

    python -m experiments.second_light.opinion --judge_url http://127.0.0.1:8001/v1 --judge_model judge

It reads the first answer to each prompt kept apart, of the policy before training and of every run at its end. Its
rubrics are the package's generic ones, and its scores from 0 to 9 are read by their probabilities. The same command
continues. The means go to `opinion.json.gz`, and `report.py` shows them.
"""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from experiments.second_light.run import DATA, HERE, RECORDS, START, read, write
from rankbuffer_tools.jobs.ask import ask_many
from rankbuffer_trl.data.queries import GENERIC, QueryTable, load_queries
from rankbuffer_trl.judge import Question, pointwise_question
from rankbuffer_trl.judge.config import JudgeConfig

OPINION = HERE / "opinion.json.gz"
ANSWERS = 1  # to each prompt
MOST = 9


def questions(records: Path) -> dict[str, Question]:
    """Return the questions, by run, prompt and number of the answer, one prompt after the other."""
    queries = QueryTable(load_queries(str(DATA["kept_apart"])))
    kept = {path.name.partition(".")[0]: read(path)["kept_apart"]["40"] for path in sorted(records.glob("*.json.gz"))}
    kept = {"start": read(START)["kept_apart"], **kept}
    return {
        f"{name} {id} {i}": replace(
            pointwise_question(replace(queries[id], rubrics=GENERIC), answers[id][i], most=MOST), soft=True
        )
        for id in kept["start"]
        for name, answers in kept.items()
        for i in range(ANSWERS)
    }


def main() -> None:
    """Ask what is open, and write the mean score of each run by prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge_url", required=True)
    parser.add_argument("--judge_model", required=True)
    parser.add_argument("--log", type=Path, default="runs/second_light/opinion.jsonl", help="file of the judgments")
    given = parser.parse_args()
    config = JudgeConfig(given.judge_url, given.judge_model, judge_decoding="json_schema", judge_concurrency=1)
    found: dict[str, dict[str, list[float]]] = {}
    answers = asyncio.run(ask_many(config.judge(), questions(RECORDS), given.log, "asking the judge"))
    for name, reading in answers.values.items():
        run, id, _ = name.split()
        found.setdefault(run, {}).setdefault(id, []).append(reading.mean)
    write(OPINION, {run: {id: round(fmean(each), 3) for id, each in of.items()} for run, of in found.items()})
    print(f"{OPINION}: {len(answers.values):,} scores, {len(answers.failures):,} without a verdict")


if __name__ == "__main__":
    main()
