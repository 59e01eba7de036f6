"""Ask a real judge about the answers that were kept: scores that no run was trained by.

    python -m experiments.real_policy.real_judge --judge_url http://127.0.0.1:8001/v1 --judge_model judge

It reads the first answer to each prompt kept apart, of the policy before training and of every run at its end. Its
rubrics are the package's generic ones, and its scores from 0 to 9 are read by their probabilities. They go to
`real_judge.json.gz`, and `report.py` shows them. The same command continues, and asks nothing again that is in there.
"""

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from experiments.real_policy.run import DATA, HERE, RECORDS, START, read, write
from rankbuffer_tools.batch.ask import ask_many
from rankbuffer_trl.data import GENERIC_RUBRICS, QueryTable, load_queries
from rankbuffer_trl.judge import Question, pointwise_question
from rankbuffer_trl.judge.config import JudgeConfig

SCORES = HERE / "real_judge.json.gz"
MOST = 9


def questions(records: Path) -> dict[tuple[str, str], Question]:
    """Return the question about the first answer, by run and prompt, one prompt after the other."""
    queries = QueryTable(load_queries(str(DATA["kept_apart"])))
    kept = {path.name.partition(".")[0]: read(path)["kept_apart"]["40"] for path in sorted(records.glob("*.json.gz"))}
    kept = {"start": read(START)["kept_apart"], **kept}
    return {
        (run, id): replace(
            pointwise_question(replace(queries[id], rubrics=GENERIC_RUBRICS), answers[id][0], most=MOST), soft=True
        )
        for id in kept["start"]
        for run, answers in kept.items()
    }


def main() -> None:
    """Ask what is open, and write the score of each run's answer by prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge_url", required=True)
    parser.add_argument("--judge_model", required=True)
    parser.add_argument("--log", type=Path, default="runs/real_policy/real_judge.jsonl", help="file of the judgments")
    given = parser.parse_args()
    config = JudgeConfig(given.judge_url, given.judge_model, judge_decoding="json_schema", judge_concurrency=1)
    found: dict[str, dict[str, float]] = read(SCORES) if SCORES.is_file() else {}
    asked = {f"{run} {id}": q for (run, id), q in questions(RECORDS).items() if id not in found.get(run, {})}
    answers = asyncio.run(ask_many(config.judge(), asked, given.log, "asking the judge"))
    for name, reading in answers.values.items():
        run, id = name.split()
        found.setdefault(run, {})[id] = round(reading.mean, 3)
    write(SCORES, found)
    print(f"{SCORES}: {len(answers.values):,} scores, {len(answers.failures):,} without a verdict")


if __name__ == "__main__":
    main()
