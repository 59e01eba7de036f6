"""Write the prompts of that run with four references each, in the order of the judge's probabilities.

    python -m experiments.weak_judge.references runs/weak_judge/references.jsonl

A bootstrap takes the order of its first anchors from one list, by the judge's words. Where these say nothing, the
anchors of `rankbuffer_soft` have no order either. The references are answers of the row `ratings_soft` at its first
visits: of eight, the ones with the lowest, third lowest, third highest and highest mean score. `weak_judge.json.gz`
has them.
"""

import argparse
import gzip
import json
from pathlib import Path

from experiments.weak_judge.report import KEPT
from rankbuffer_tools.batch.output import write_rows

PROMPTS = Path(__file__).parents[2] / "recipes" / "small" / "everyday.jsonl"
RANKS = (0, 2, 5, 7)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="file to write")
    path = parser.parse_args().path
    visits = json.loads(gzip.decompress(KEPT.read_bytes()))["ratings_soft"]["visits"]
    rated = {
        visit["query_id"]: [text for _, text in sorted(zip(visit["rewards"], visit["answers"], strict=True))]
        for visit in visits
        if visit["epoch"] == 0
    }
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [row | {"responses": [rated[row["query_id"]][rank] for rank in RANKS]} for row in rows])


if __name__ == "__main__":
    main()
