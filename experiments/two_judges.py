"""Draw the figure of `docs/results.md`: a real policy under a reliable judge, and under one that is not.

    python -m experiments.two_judges    # writes experiments/two_judges.png from the kept records

The left half has the runs of `real_policy` under the sharp judge, the right half the duels of `weak_judge`.
"""

import gzip
import json
from pathlib import Path

from matplotlib.figure import Figure

from experiments.real_policy import report as second
from experiments.weak_judge import report as first

PICTURE = Path(__file__).with_suffix(".png")
NAMES = {
    "ratings_soft": "a score, by token\nprobabilities",
    "ratings_soft_seed_1": "the same,\nanother seed",
    "pairs_soft": "pairs, by token\nprobabilities",
    "rankbuffer_soft_references": "RankBuffer, by token\nprobabilities",
    "rankbuffer_soft": "the same, but first\na greedy list",
    "pointwise": "a greedy score\n(GRPO)",
    "rankbuffer": "RankBuffer,\ngreedy verdicts",
}


def main(path: Path = PICTURE) -> None:
    """Draw both halves, and write the picture."""
    picture = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = picture.subplots(1, 2, width_ratios=[1.1, 1])
    measure = second.Measure()
    start = measure.quality(second.read(second.START)["trained"])
    second.draw_epochs(left, second.outcomes(second.RECORDS, measure), "sharp", start)
    left.set_title("a reliable judge: true quality", fontsize=10, loc="left")
    rows = json.loads(gzip.decompress(first.KEPT.read_bytes()))
    first.draw_duels(right, {told: rows[name] for name, told in NAMES.items()}, [("kept_apart", "with_rubrics")])
    right.set_title("greedy verdicts no better than chance: who wins the duels?", fontsize=10, loc="left")
    right.set_xlabel("share won by the trained policy, against the untrained one")
    right.spines[["top", "right"]].set_visible(False)
    picture.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
