"""Arena-Hard's official style control, on the judgments of a run.

    python -m evaluation.arena_hard.style_control runs/evaluation/rankbuffer/arena_hard --assets_dir assets

The official scripts need `tiktoken`, which downloads its vocabulary `o200k_base` on first use.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from rankbuffer_trl.errors import RankBufferError

from ..assets import AssetError, Assets
from ..files import file_name, read_jsonl, write_jsonl
from ..official import run_official
from .scores import BATTLE_SCORES

BENCH = "arena-hard-v2.0"
JUDGE_LABEL = "judge"
NOTHING = {"boto3": "", "shortuuid": ""}  # the scripts import them, and use neither here


def style_control(assets: Assets, folder: Path, model: str, stubs: Mapping[str, str] = NOTHING) -> str:
    """Return what the official scripts print for a run's judgments with style control. `stubs`: see [`run_official`].

    The normalisation is pooled over all judged models. Here there is one, so the number is not the leaderboard's.

    Raises:
        [`AssetError`]: if a script fails, or the run has no judgments.
    """
    checkout = assets.path("arena_hard", "show_result").parent
    files = list((folder / "model_judgment").glob(f"*/{file_name(model)}.jsonl"))
    if len(files) != 1:
        raise AssetError(
            f"{folder / 'model_judgment'} must hold judgments of {model!r} by one judge, not {len(files)}"
        )
    with TemporaryDirectory() as folder_name:
        layout = official_layout(Path(folder_name) / "official", checkout)
        rows = [row for row in read_jsonl(files[0]) if all(g and g["score"] in BATTLE_SCORES for g in row["games"])]
        write_jsonl(layout / "data" / BENCH / "model_judgment" / JUDGE_LABEL / files[0].name, rows)
        plain = layout / "plain"
        plain.mkdir()
        for name in {row["baseline"] for row in rows}:
            (plain / f"{name}.jsonl").write_bytes(assets.path("arena_hard", name).read_bytes())
        (plain / files[0].name).write_bytes((folder / "model_answer" / files[0].name).read_bytes())
        answers = layout / "data" / BENCH / "model_answer"
        script = assets.path("arena_hard", "add_markdown_info")
        # It adds the `metadata` that style control reads.
        run_official(script, "--dir", str(plain), "--output-dir", str(answers), cwd=layout, stubs=stubs)
        printed = []
        for category in dict.fromkeys(row["category"] for row in rows):
            arguments = ("-j", JUDGE_LABEL, "-c", category, "-f", "markdown", "length")
            printed.append(run_official(layout / "show_result.py", *arguments, cwd=layout, stubs=stubs))
        return "\n".join(printed)


def official_layout(place: Path, checkout: Path) -> Path:
    """Make a folder in which the official scripts find their code and the questions. Other data can be added."""
    data = place / "data" / BENCH
    data.mkdir(parents=True)
    for path in ("utils", "show_result.py"):
        (place / path).symlink_to((checkout / path).absolute())
    (data / "question.jsonl").symlink_to((checkout / "data" / BENCH / "question.jsonl").absolute())
    return place


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, help="RUN/LABEL/arena_hard of an evaluation")
    parser.add_argument("--assets_dir", default="assets", help="folder with the official checkouts")
    parser.add_argument("--assets_manifest", help="YAML file whose entries replace those of assets.yaml")
    arguments = parser.parse_args()
    try:
        assets = Assets(arguments.assets_dir, arguments.assets_manifest)
        print(style_control(assets, arguments.folder, arguments.folder.parent.name))
    except (RankBufferError, OSError) as error:
        sys.exit(f"evaluation: {error}")


if __name__ == "__main__":
    main()
