"""Answers of known order: good ones, the same ones damaged, answers to other prompts, and those of a weaker model.

    python -m experiments.real_judge.answers --good GOOD.jsonl --weak WEAK.jsonl --output_file ANSWERS.jsonl

Both files hold the same queries, each with two samples or more (`recipes/generate_responses.py` makes them).
"""

import argparse
import json
from pathlib import Path
from random import Random

DAMAGED = "good_cut", "good_shuffled", "off_topic", "weak", "weak_shuffled"
BETTER = [("good", worse) for worse in DAMAGED[:-1]] + [("weak", "weak_shuffled")]
"""The pairs of answers whose order is known, better first. Of `weak`, only the model is known to be worse."""


def answers_of(rows: list[dict], weak: list[dict]) -> list[dict]:
    """Return a row per query with its answers by name.

    * `good` and `good_2`: two samples of the stronger model
    * `good_cut`: the first half of the words of `good`
    * `good_shuffled`: the words of `good` in a random order
    * `off_topic`: the good answer to another query
    * `weak` and `weak_shuffled`: a sample of the weaker model, and its words in a random order
    """
    by_id = {row["query_id"]: row["responses"][0] for row in weak}
    found = []
    for i, row in enumerate(rows):
        good, good_2 = row["responses"][:2]
        words, id = good.split(), row["query_id"]
        answers = {
            "good": good,
            "good_2": good_2,
            "good_cut": " ".join(words[: len(words) // 2]),
            "good_shuffled": shuffled(good, id),
            "off_topic": rows[(i + len(rows) // 2) % len(rows)]["responses"][0],
            "weak": by_id[id],
            "weak_shuffled": shuffled(by_id[id], id),
        }
        found.append({key: row[key] for key in ("query_id", "prompt", "rubrics")} | {"answers": answers})
    return found


def shuffled(text: str, seed: str) -> str:
    """Return the words of a text in a random order."""
    words = text.split()
    Random(seed).shuffle(words)
    return " ".join(words)


def main() -> None:
    """Read both files and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--good", "--weak", "--output_file"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    good, weak = (
        [json.loads(line) for line in path.read_text().splitlines()] for path in (arguments.good, arguments.weak)
    )
    rows = answers_of(good, weak)
    arguments.output_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
