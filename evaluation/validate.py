"""Our arithmetic against the benchmarks' own, on official data and beside official scripts.

    python -m evaluation.validate --assets_dir assets

It needs the official checkouts in `assets_dir` (each message says how to get them) and prints ours, the official
number and their difference. What is not there is skipped, and said.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from .assets import MANIFEST, AssetError, Assets
from .config import BENCHMARKS
from .results import table
from .validation import alpaca_eval, arena_hard, wildbench, writingbench
from .validation.check import Check, ScriptError

CHECKS = dict(zip(BENCHMARKS, (alpaca_eval, arena_hard, wildbench, writingbench), strict=True))


def run_checks(assets: Assets, name: str) -> Iterator[Check | AssetError]:
    """The comparisons of one benchmark, and at the end what is missing, if anything is."""
    try:
        yield from CHECKS[name].checks(assets)
    except AssetError as missing:
        yield missing


def main() -> None:
    """The command. It ends with status 1 if a number differs or a benchmark could not be validated at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets_dir", default="assets", help="folder with the official checkouts")
    parser.add_argument("--assets_manifest", default=str(MANIFEST), help="which files belong there")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, help="some of the four")
    parser.add_argument(
        "--style_control",
        metavar="RUN/LABEL/arena_hard",
        help="only run the official style control on a run's judgments; it needs tiktoken's o200k_base vocabulary",
    )
    arguments = parser.parse_args()
    assets = Assets(arguments.assets_dir, arguments.assets_manifest)
    if arguments.style_control:
        folder = Path(arguments.style_control)
        try:
            print(arena_hard.style_control(assets, folder, folder.parent.name))
        except AssetError as fault:
            sys.exit(f"evaluation: {fault}")
        return
    rows, missing, failed = [], [], 0
    for name in arguments.benchmarks:
        found = list(run_checks(assets, name))
        made = [each for each in found if isinstance(each, Check)]
        faults = [each for each in found if not isinstance(each, Check)]
        missing += [f"{'FAILED' if isinstance(each, ScriptError) else 'SKIPPED'} {name}: {each}" for each in faults]
        failed += sum(not check.agrees for check in made) + sum(isinstance(each, ScriptError) for each in faults)
        failed += not made
        rows += [
            (
                name,
                check.name,
                f"{check.ours:.10g}",
                f"{check.official:.10g}",
                f"{check.difference:+.1e}" if check.difference else "0",
                "yes" if check.agrees else "NO",
            )
            for check in made
        ]
    print(table(("benchmark", "number", "ours", "official", "difference", "agrees"), rows))
    for line in missing:
        print(line)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
