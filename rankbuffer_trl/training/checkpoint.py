"""Which files make a checkpoint whole, where the stores are, and how to read them.

A checkpoint of the trainer holds the folder `rankbuffer`: the store's segments (`store/segments.py`) and `run.json`,
which says what run it belongs to.
"""

import dataclasses
import json
import os
import struct
import zipfile
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .. import __version__
from ..data.queries import QueryTable
from ..judge import Judge, Totals
from ..rewards.method import RewardMethod
from ..store import BufferStore, StoreError, segments
from ..store.places import FOLDER, RUN, STATE, checkpoints
from .config import RankBufferConfig

logger = get_logger(__name__)

TORN, OLD = "_torn", "_old"  # not uploaded either
BINDING = {
    "method": "the reward method",
    "method_args": "its arguments",
    "judge": "the judge model",
    "judge_guard": "how responses are quoted for the judge",
    "format_check": "what counts as an answer",
    "queries": "the number of queries",
    "data_sha256": "the data",
    "seed": "the seed, and with it the order of the data",
    "num_generations": "rollouts per query",
    "queries_per_generation": "queries per generation batch",
    "steps_per_generation": "optimizer steps per generation batch",
}


def why_torn(checkpoint: Path) -> str | None:
    """What a checkpoint lacks; `None` if it is whole.

    The trainer's state is written last, but a folder that was copied in part or hit by a power cut can have it all the
    same, so every file that has a known form is checked for its end.
    """
    try:
        read_json(checkpoint / STATE)
        processes = read_json(checkpoint / FOLDER / RUN)["processes"]
        segments.read(checkpoint / FOLDER)
    except ValueError as error:
        return str(error)
    for name in ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]:
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    for name, pattern in {"weights": "*.safetensors", "optimizer.pt": "optimizer*"}.items():
        if not any(any(checkpoint.glob(found)) for found in (pattern, "global_step*")):  # DeepSpeed has its own folder
            return f"{name} is missing"
    for index in checkpoint.glob("*.index.json"):
        for name in sorted(set(read_json(index)["weight_map"].values())):
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
    for path in sorted(checkpoint.rglob("*")):
        if path.suffix in (".pt", ".pth", ".bin") and not zipfile.is_zipfile(path):
            return f"{path.name} is cut short"
        if path.suffix == ".safetensors" and not ends_as_told(path):
            return f"{path.name} is cut short"
    return None


def read_json(path: Path) -> dict:
    """The contents of a JSON file.

    Raises:
        `ValueError`: if it is missing or cut short.
    """
    try:
        return json.loads(path.read_text())
    except OSError:
        raise ValueError(f"{path.name} is missing") from None
    except ValueError:
        raise ValueError(f"{path.name} is cut short") from None


def ends_as_told(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError):
        return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return path.stat().st_size == 8 + length + max(ends, default=0)


def newest_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The whole checkpoint with the highest step in `output_dir`. Torn ones above it are skipped with a line.

    Raises:
        [`StoreError`]: if there is none.
    """
    for _, path in checkpoints(output_dir):
        torn = why_torn(path)
        if torn is None:
            return path
        logger.warning(f"skipping {path}, which is not a whole checkpoint (the run was stopped while writing): {torn}")
    raise StoreError(f"no whole checkpoint in {output_dir} to resume from")


def set_torn_aside(output_dir: str | os.PathLike) -> None:
    """Move torn checkpoints to `_torn`, so that `save_total_limit` does not keep one in the place of a whole one."""
    for _, path in checkpoints(output_dir):
        if why_torn(path) is not None:
            set_aside(path, TORN)


def set_old_aside(output_dir: str | os.PathLike, step: int) -> None:
    """Move checkpoints above `step`, where a run starts, to `_old`: they are not its own, and look like its newest."""
    old = [path for number, path in checkpoints(output_dir) if number > step]
    for path in old:
        set_aside(path, OLD)
    if old:
        names = ", ".join(path.name for path in old)
        logger.warning(f"{output_dir}: moved to {OLD}/, since this run starts at step {step}: {names}")


def set_aside(checkpoint: Path, folder: str) -> None:
    """Move a checkpoint into a folder beside it, under a name that is free."""
    names = (checkpoint.parent / folder / f"{checkpoint.name}.{number}" for number in count())
    (checkpoint.parent / folder).mkdir(exist_ok=True)
    checkpoint.rename(next(name for name in names if not name.exists()))


def check_not_uploaded(checkpoint: Path, output_dir: str | os.PathLike) -> None:
    """Refuse a checkpoint that lies where each push of `output_dir` would put it over the newest one on the Hub.

    Raises:
        [`StoreError`]: naming where to put it.
    """
    home = Path(output_dir).resolve()
    if not checkpoint.resolve().is_relative_to(home):
        return
    first = next(iter(checkpoint.resolve().relative_to(home).parts), "")
    if not first.startswith("_") and not first.removeprefix("checkpoint-").isdigit():
        raise StoreError(
            f"{checkpoint} lies in output_dir, so every push would upload it again, over a newer one on the Hub: move"
            f" it into {Path(output_dir) / '_from_hub'} (names that begin with an underscore stay here)"
        )


def check_resumable(checkpoint: Path, identity: Mapping[str, Any], with_changes: bool) -> None:
    """Refuse a checkpoint that is not whole, or whose buffers belong to another run, unless changes are allowed.

    Raises:
        [`StoreError`]: naming what is missing, or all that differs.
    """
    torn = why_torn(checkpoint)
    if torn:
        raise StoreError(f"{checkpoint} is not a whole checkpoint: {torn}")
    saved = read_json(checkpoint / FOLDER / RUN)
    changed = differences(saved, identity)
    message = f"{checkpoint} belongs to another run:\n  " + "\n  ".join(changed)
    if changed and not with_changes:
        raise StoreError(f"{message}\nSet resume_with_changes to go on from it all the same")
    if changed:
        logger.warning(message)
    if saved["processes"] != identity["processes"]:
        logger.warning(
            f"{checkpoint} was saved by {saved['processes']} processes, now there are {identity['processes']}: queries"
            " are visited in the same order, but sampled rollouts will differ"
        )


def check_step(checkpoint: Path, store: BufferStore) -> int:
    """The step of a checkpoint, which is refused if policy and restored buffers are of different steps.

    Raises:
        [`StoreError`]: naming both steps.
    """
    step, last = read_json(checkpoint / STATE)["global_step"], store.last_step()
    if last is not None and last >= step:
        raise StoreError(f"{checkpoint} does not belong together: the policy is at step {step}, its buffers at {last}")
    return step


def write_store(store: BufferStore, checkpoint: Path, run: Mapping[str, Any]) -> None:
    """Put the store and `run.json` into a checkpoint, or into the run's folder, before the trainer writes the rest.

    Raises:
        [`StoreError`]: if they cannot be written.
    """
    try:
        store.save(checkpoint / FOLDER)
        segments.write_json(checkpoint / FOLDER / RUN, run, indent=1)
    except OSError as error:
        raise StoreError(f"cannot write {checkpoint}: {error}") from error


def identity(args: RankBufferConfig, method: RewardMethod, judge: Judge, queries: QueryTable) -> dict[str, Any]:
    """What buffers depend on, as it stands in a checkpoint's `run.json`."""
    found = {
        "method": args.method,
        "method_args": dataclasses.asdict(method),
        "judge": args.judge_model or type(judge.client).__name__,
        "judge_guard": args.judge_guard,
        "format_check": args.format_check,
        "queries": len(queries),
        "data_sha256": queries.sha256,
        "seed": args.seed if args.data_seed is None else [args.seed, args.data_seed],
        "num_generations": args.num_generations,
        "queries_per_generation": args.queries_per_generation,
        "steps_per_generation": args.steps_in_generation,
        "processes": args.world_size,
    }
    return json.loads(json.dumps(found, default=str))


def describe(identity: Mapping[str, Any], step: int, totals: Mapping[str, Totals], args: RankBufferConfig) -> dict:
    """The contents of `run.json`: project version, identity, step, ledger totals and all settings.

    Addresses of judges and tokens for the Hub are left out, since a checkpoint may be published.
    """
    settings = {
        key: value for key, value in args.to_dict().items() if key != "judge_url" and not key.endswith("_token")
    }
    sums = {phase: total.as_dict() for phase, total in totals.items()}
    described = {"rankbuffer_trl": __version__, "step": step, **identity, "totals": sums, "config": settings}
    return json.loads(json.dumps(described, default=str))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for everything that a checkpoint and a run do not have in common."""
    return [
        f"{key} ({meaning}): {saved.get(key)!r} in the checkpoint, {current[key]!r} now"
        for key, meaning in BINDING.items()
        if saved.get(key) != current[key]
    ]


def check_trusted(checkpoint: Path, output_dir: str | os.PathLike, trusted: bool) -> None:
    """Refuse a DeepSpeed checkpoint from elsewhere, unless the user trusts it.

    DeepSpeed loads its folder `global_step<N>` with `torch.load(weights_only=False)`, which executes code that the
    files contain. All other files of a checkpoint are read without executing code. A checkpoint is from elsewhere if
    it is not a folder `checkpoint-<N>` in `output_dir`, or if `hf download` put it there.

    Args:
        checkpoint (`Path`):
            The checkpoint to resume from.
        output_dir (`str` or `Path`):
            The folder of the run.
        trusted (`bool`):
            The setting `trust_checkpoint`.

    Raises:
        [`StoreError`]: naming the checkpoint and the setting.
    """
    real, home = checkpoint.resolve(), Path(output_dir).resolve()
    # `hf download --local-dir` keeps a record of each file that it wrote.
    downloaded = (home / ".cache" / "huggingface" / "download" / real.name).exists()
    own = real.parent == home and real.name.removeprefix("checkpoint-").isdigit() and not downloaded
    if not trusted and not own and any(real.glob("global_step*")):
        raise StoreError(
            f"{checkpoint} is a DeepSpeed checkpoint that this output_dir did not write, and loading it would execute"
            " code that it contains: set trust_checkpoint to true if you trust its author"
        )
