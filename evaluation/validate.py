"""Compare this project's arithmetic with the benchmarks' own, on official data and against official scripts.

    python -m evaluation.validate --assets_dir assets

The command needs the official checkouts in `assets_dir`; each message says how to get them. It prints our number, the
official number and their difference. It names what it skips because a file is missing.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankbuffer_trl.errors import RankBufferError

from .arena_hard.validation import style_control
from .assets import AssetError, Assets
from .official import Check, ScriptError
from .results import table
from .rooms import ROOMS


def run_checks(assets: Assets, name: str) -> Iterator[Check | AssetError]:
    """Yield the comparisons of one benchmark, and at last the files that are missing, if any."""
    try:
        yield from ROOMS[name].checks(assets)
    except AssetError as missing:
        yield missing


def main() -> None:
    """Run the command. It exits with status 1 if a number differs or a benchmark could not be validated at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets_dir", default="assets", help="folder with the official checkouts")
    parser.add_argument("--assets_manifest", help="YAML file whose entries replace those of assets.yaml")
    parser.add_argument("--benchmarks", nargs="+", choices=ROOMS, default=list(ROOMS), help="benchmarks to validate")
    parser.add_argument(
        "--style_control",
        metavar="RUN/LABEL/arena_hard",
        help="only run the official style control on a run's judgments; it needs tiktoken's o200k_base vocabulary",
    )
    arguments = parser.parse_args()
    try:
        assets = Assets(arguments.assets_dir, arguments.assets_manifest)
        if arguments.style_control:
            folder = Path(arguments.style_control)
            print(style_control(assets, folder, folder.parent.name))
        else:
            sys.exit(validate(assets, arguments.benchmarks))
    except (RankBufferError, OSError) as error:
        sys.exit(f"evaluation: {error}")


def validate(assets: Assets, benchmarks: Sequence[str]) -> int:
    """Print all comparisons and return the exit code."""
    rows, missing, failed = [], [], 0
    for name in benchmarks:
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
    return 1 if failed else 0


if __name__ == "__main__":
    main()
