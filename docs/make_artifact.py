"""Run the claims of `docs/artifact.md`, or write that page.

    python docs/make_artifact.py           # run those of under 15 minutes, and print pass or fail for each
    python docs/make_artifact.py --write   # write the page from the list below

`make artifact` is the first command. The exit status is 1 if a claim fails.
"""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "artifact.md"
LONGEST = 15.0  # minutes of a claim that is run
PATIENCE = 6  # times its minutes that a claim may take, on a busy machine
RISEN = (("ratings_soft", 39), ("ratings_soft_seed_1", 37), ("pointwise", 27))
LIGHT = "python -m experiments.weak_judge.report"
SECOND = "python -m experiments.real_policy.report"
REPLAY = "python -m experiments.judge_cost.run --paper --acuity_queries 200"
REAL = "python -m experiments.real_judge.report experiments/real_judge/qwen2.5-coder-1.5b.jsonl.gz"
HEAD = """# Claims, and how to check them

`make artifact` runs the rows of under 15 minutes and prints `pass` or `fail` for each, without GPU, account or model.
Minutes with `(page)` (of the command's page) or `(at most)` (all slow tests) are of quiet cores, others of busy ones.

| claim | command | minutes | expected |
|---|---|---:|---|
"""
TAIL = """
A row of a real policy or judge reads a record of answers and verdicts, because to ask the model again takes hours
([`weak_judge.md`](results/weak_judge.md), [`real_judge`](../experiments/real_judge/README.md)). No row repeats a table
of the paper, because that needs GPUs, its data and its judge ([`paper.md`](paper.md)).
"""


@dataclass(frozen=True)
class Claim:
    """A claim with its command.

    Args:
        text (`str`):
            What is claimed.
        command (`str`):
            What shows it.
        minutes (`float`):
            Minutes on two cores.
        pattern (`str`):
            A regular expression for the output, with a group for each expected number.
        expected (`tuple[float, ...]`):
            The numbers. Without one, the pattern must be found.
        tolerance (`float`):
            How far each number may be off.
        source (`str`):
            Where the minutes come from, if they were not measured.
    """

    text: str
    command: str
    minutes: float
    pattern: str
    expected: tuple[float, ...] = ()
    tolerance: float = 0.0
    source: str = ""

    def fault(self, output: str) -> str | None:
        """Say what an output lacks, `None` if it shows the claim."""
        if not (found := re.search(self.pattern, output, re.DOTALL)):
            return f"the output has nothing like {self.pattern!r}"
        numbers = [float(text.replace(",", "")) for text in found.groups()]
        if all(abs(got - wanted) <= self.tolerance for got, wanted in zip(numbers, self.expected, strict=True)):
            return None
        return f"{numbers}, expected {list(self.expected)} ± {self.tolerance:g}"

    def row(self) -> str:
        """Format the row of the page."""
        wanted = ", ".join(f"{number:,g}" for number in self.expected) or (
            "the tests pass" if "pytest" in self.command else f"`{self.pattern}`"
        )
        tolerance = f" ± {self.tolerance:g}" if self.expected else ""
        minutes = f"{self.minutes:g}{self.source and f' ({self.source})'}"
        return f"| {self.text} | `{self.command}` | {minutes} | {wanted}{tolerance} |\n"


def replayed(row: str) -> str:
    """Return the pattern of questions, tokens and tau of a row of the replay."""
    return rf"│ {row} +│ ([\d.]+) +│ [\d.]+ +│ ([\d,]+) +│ [\d.]+ +│ [\d,]+ +│ [\d.]+ +│ ([\d.]+) "


CLAIMS = (
    Claim(
        "one group of RankBuffer is ranked by the embedded judge", "python examples/one_group.py", 0.1, r"R2 < R5 < R1"
    ),
    Claim(
        "under a reliable judge, a real policy comes from 40.5 of 100 to this quality by GRPO, and by RankBuffer",
        SECOND,
        0.1,
        r"│ grpo +│ 8 +│ [\d ]+│ ([\d.]+).*│ rankbuffer +│ 8 +│ [\d ]+│ ([\d.]+)",
        (54.3, 59.0),
        0.05,
    ),
    *(
        Claim(
            f"of 40 prompts, so many have a higher mean score at the second visit of a real policy trained by `{row}`",
            LIGHT,
            0.1,
            rf"│ {row} +│ 2 +│ 40 +│ [\d.]+ +│ [\d.]+ +│ (\d+) ",
            (risen,),
        )
        for row, risen in RISEN
    ),
    Claim(
        "of 40 duels on prompts kept apart, a policy that `ratings_soft` trained wins this share, by kept verdicts",
        LIGHT,
        0.1,
        r"│ ratings_soft_again +│ prompts kept apart +│ the judge +│ 40 +│ [^│]+│ ([\d.]+) ",
        (0.88,),
        0.005,
    ),
    *(
        Claim(
            f"a real 1.5B judge orders two answers rightly by its {read} of a rating",
            REAL,
            0.1,
            pattern,
            (share,),
            0.005,
        )
        for read, pattern, share in (
            ("word", r"rating 0 to 9 \| word \| (?:\S+ \| ){4}([\d.]+)", 0.742),
            ("probabilities", r"rating 0 to 9 \| probabilities \| (?:\S+ \| ){4}([\d.]+)", 0.936),
        )
    ),
    *(
        Claim(
            f"questions, tokens and agreement of a group, by {name}",
            REPLAY,
            12,
            replayed(row),
            numbers,
            0.005,
            "page",
        )
        for name, row, numbers in (
            ("RankBuffer", "RankBuffer", (9.34, 24170, 0.784)),
            ("two lists", "List, 2 passes", (2.00, 7263, 0.835)),
            ("all pairs (RRC-SCR)", "RRC-SCR", (26.97, 33157, 0.844)),
        )
    ),
    Claim(
        "agreement by GRPO's scores, at noise 0.03 and 0.09",
        REPLAY,
        12,
        r"│ GRPO +│ ([\d.]+) +│ [\d.]+ +│ ([\d.]+) +│ [\d.]+ +│ [\d.]+ +│\n",
        (0.451, 0.436),
        0.005,
        "page",
    ),
    Claim(
        "the quickstart's tiny policy learns from 50 to 98 points",
        "python recipes/quickstart/run.py --seed 0",
        3,
        r"(\d+) before training, (\d+) after",
        (50, 98),
        2,
        "page",
    ),
    Claim(
        "the method in one file gives the rewards and weights of the package",
        "python -m pytest tests/test_one_file.py",
        1,
        r"\d+ passed",
    ),
    Claim(
        "a run that is killed anywhere ends like an undisturbed one",
        "python -m pytest tests/test_resume.py -m slow -k kills",
        9,
        r"\d+ passed",
        source="at most",
    ),
    Claim(
        "1, 2 and 4 processes give the same rewards",
        "python -m pytest tests/test_resume.py -m slow -k spread",
        9,
        r"\d+ passed",
        source="at most",
    ),
)


@cache
def output_of(command: str, seconds: float) -> str:
    """Run a command once, and return what it prints.

    Raises:
        `RuntimeError`: if it fails, or takes too long.
    """
    words = [sys.executable if word == "python" else word for word in command.split()]
    environment = os.environ | {"COLUMNS": "240", "DS_ACCELERATOR": "cpu"}
    try:
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end within {seconds / 60:.0f} minutes") from None
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
    return done.stdout


def run(claim: Claim) -> str | None:
    """Run a claim's command, and say what is wrong, `None` if nothing is."""
    try:
        return claim.fault(output_of(claim.command, 60 * PATIENCE * (1 + claim.minutes)))
    except RuntimeError as error:
        return str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--minutes", type=float, default=LONGEST, help="run the claims of fewer minutes")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page())
        return
    failed = 0
    for claim in CLAIMS:
        if claim.minutes < args.minutes:
            fault = run(claim)
            failed += fault is not None
            print(f"{'pass' if fault is None else 'fail'}  {claim.text}{f': {fault}' if fault else ''}", flush=True)
    sys.exit(failed > 0)


def page() -> str:
    """Build the page."""
    return HEAD + "".join(claim.row() for claim in CLAIMS) + TAIL


if __name__ == "__main__":
    main()
