"""Which files make a checkpoint whole, and whether a run may resume from it.

A checkpoint of the trainer has the folder `rankbuffer` with the store and the manifest `run.json`. The manifest is the
last file that is written. It says which run and step the checkpoint belongs to, and lists all other files.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger

from .. import __version__
from ..data.queries import QueryTable
from ..errors import SettingsError
from ..files import fingerprint, replacing, sync
from ..judge import Judge, Totals
from ..judge.config import BudgetConfig
from ..rewards.method import RewardMethod, find_method
from ..settings import changed_arguments, load_path
from ..store import StoreError
from ..store.buffer_store import STORE
from ..store.database import VERSION
from ..store.places import (
    FOLDER,
    LIVE_STORE,
    RUN,
    STATE,
    checkpoint_step,
    checkpoints,
    read_manifest,
    read_state,
    read_store,
)
from ..store.spending import Spending
from .config import RankBufferConfig

logger = get_logger(__name__)

Faults = dict[Path, str | None]
TORN, OLD = "_torn", "_old"  # not uploaded either
PRIVATE = ("_url", "_host", "_token")  # how the names of settings end that a published checkpoint does not hold
BINDING = {  # one that a later version lacks stays here: where a checkpoint has it set, the run is another
    "method": "the reward method",
    "method_args": "its arguments",
    "judge": "the judge model",
    "judge_args": "the arguments of the judge client",
    "judge_guard": "how responses are quoted for the judge",
    "format_check": "what counts as an answer",
    "rubric_dropout": "the share of rubrics that a visit leaves out",
    "judge_view": "what the judge sees of a rollout with tools",
    "queries": "the number of queries",
    "data_sha256": "the data",
    "seed": "the seed, and with it the order of the data",
    "num_generations": "rollouts per query",
    "queries_per_generation": "queries per generation batch",
    "steps_per_generation": "optimizer steps per generation batch",
}


def why_torn(checkpoint: Path, known: Faults | None = None) -> str | None:
    """Return what is wrong with a checkpoint, `None` if it is whole and all of it was saved at one step.

    Args:
        checkpoint (`Path`):
            The checkpoint.
        known (`dict[Path, str | None]`, *optional*):
            What earlier calls found. It is read and added to, so that a checkpoint of many gigabytes is read once.
    """
    known = {} if known is None else known
    place = checkpoint.resolve()
    if place not in known:
        known[place] = find_fault(checkpoint)
    return known[place]


def find_fault(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, as [`why_torn`] does, by reading all of its files."""
    try:
        run = read_manifest(checkpoint)
        state = read_state(checkpoint)
    except ValueError as error:
        return str(error)
    if run["config"].get("save_only_model"):
        return "it was saved with save_only_model, so it has no optimizer"
    steps = {RUN: run["step"], STATE: state.get("global_step")}
    if (named := checkpoint_step(checkpoint)) is not None:
        steps["its name"] = named
    if any(step != run["step"] for step in steps.values()):
        return "it is mixed from several steps: " + ", ".join(f"{what} says {step!r}" for what, step in steps.items())
    for name in (STATE, f"{FOLDER}/{STORE}"):  # a run's own folder, which has no optimizer, lists the store alone
        if name not in run["files"]:
            return f"{RUN} is not the manifest of a checkpoint, since it does not list {name}"
    there = files_of(checkpoint)  # names from the manifest are looked up here and never opened
    for name, mark in run["files"].items():
        if name not in there:
            return f"{name} is missing"
        if fingerprint(there[name]) != mark:
            return f"{name} is cut short or not the file that was saved at step {run['step']}"
    return None


def files_of(checkpoint: Path) -> dict[str, Path]:
    """Return all files of a checkpoint but its manifest, by their names in the manifest."""
    files = {path.relative_to(checkpoint).as_posix(): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    files.pop(f"{FOLDER}/{RUN}", None)
    return files


def newest_checkpoint(output_dir: str | os.PathLike, known: Faults | None = None) -> Path:
    """Return the whole checkpoint with the highest step in `output_dir`. Skip torn ones above it, and log each.

    `known` is that of [`why_torn`].

    Raises:
        [`StoreError`]: if there is none.
    """
    for _, path in checkpoints(output_dir):
        torn = why_torn(path, known)
        if torn is None:
            return path
        logger.warning(f"skipping {path}, which is not a whole checkpoint: {torn}")
    raise StoreError(f"no whole checkpoint in {output_dir} to resume from")


def set_torn_aside(output_dir: str | os.PathLike, known: Faults | None = None) -> None:
    """Move torn checkpoints to `_torn`, so that `save_total_limit` does not keep one in the place of a whole one."""
    for _, path in checkpoints(output_dir):
        if why_torn(path, known) is not None:
            set_aside(path, TORN)


def set_old_aside(output_dir: str | os.PathLike, step: int) -> None:
    """Move checkpoints above `step`, where a run starts, to `_old`: they look like the newest ones of this run."""
    old = [path for number, path in checkpoints(output_dir) if number > step]
    for path in old:
        set_aside(path, OLD)
    if old:
        names = ", ".join(path.name for path in old)
        logger.warning(f"{output_dir}: moved to {OLD}/, since this run starts at step {step}: {names}")


def set_aside(checkpoint: Path, folder: str) -> None:
    """Move a checkpoint into another folder of its parent, under a name that is free."""
    names = (checkpoint.parent / folder / f"{checkpoint.name}.{number}" for number in count())
    (checkpoint.parent / folder).mkdir(exist_ok=True)
    checkpoint.rename(next(name for name in names if not name.exists()))


def delete_oldest(output_dir: str | os.PathLike, limit: int | None, best: str | None) -> None:
    """Delete the checkpoints with the lowest steps until `limit` are left. Keep the newest and the best.

    The function of transformers would also count and delete folders such as `checkpoint-3-copy`.
    """
    found = [path for _, path in checkpoints(output_dir)]
    kept = [path for path in found if path == found[0] or path == Path(best or "")]
    older = [path for path in found if path not in kept]
    if limit is not None and limit > 0:
        for path in older[max(limit - len(kept), 0) :]:
            shutil.rmtree(path, ignore_errors=True)


def check_not_uploaded(checkpoint: Path, output_dir: str | os.PathLike) -> None:
    """Refuse a checkpoint in `output_dir` that each push would upload over the newest one on the Hub.

    Raises:
        [`StoreError`]: naming where to put it.
    """
    home = Path(output_dir).resolve()
    if not checkpoint.resolve().is_relative_to(home):
        return
    first = next(iter(checkpoint.resolve().relative_to(home).parts), "")
    if not first.startswith(("_", "checkpoint-")):  # the trainer uploads neither
        raise StoreError(
            f"{checkpoint} lies in output_dir, so every push would upload it again, over a newer one on the Hub: move"
            f" it into {Path(output_dir) / '_from_hub'} (names that begin with an underscore stay here)"
        )


def check_resumable(
    checkpoint: Path, identity: Mapping[str, Any], with_changes: bool, known: Faults | None = None
) -> int:
    """Return the step of a checkpoint. Refuse one that is not whole, or of another run unless changes are allowed.

    Raises:
        [`StoreError`]: naming what is missing, or all that differs.
    """
    torn = why_torn(checkpoint, known)
    if torn:
        raise StoreError(f"{checkpoint} is not a whole checkpoint: {torn}")
    saved = read_manifest(checkpoint)
    store = checkpoint / FOLDER / STORE
    if hash_file(store) != saved["store_sha256"]:
        raise StoreError(f"{store} is damaged: its SHA-256 is not the one in {RUN}. Resume from another checkpoint")
    changed = differences(saved, identity)
    message = f"{checkpoint} belongs to another run:\n  " + "\n  ".join(changed)
    if changed and not with_changes:
        raise StoreError(f"{message}\nTo resume from it anyway, set resume_with_changes")
    if changed:
        logger.warning(message)
    if saved["processes"] != identity["processes"]:
        logger.warning(
            f"{checkpoint} was saved by {saved['processes']} processes, now there are {identity['processes']}: queries"
            " are visited in the same order, but sampled rollouts will differ"
        )
    return saved["step"]


def spent_before(output_dir: str | Path, store: str | Path | None) -> Totals:
    """Return what the judge has taken in a folder, and at least what the ledger of a store or a checkpoint has."""
    spending = Spending(Path(output_dir) / LIVE_STORE)
    if store is None:
        return spending.begin(None).totals
    with closing(read_store(store)) as saved:
        return spending.begin(saved).totals


def check_budget(args: BudgetConfig, output_dir: str | Path, store: str | Path | None) -> None:
    """Refuse to start when a budget of the judge is used up. The end of the next step would find that too late.

    Args:
        args (`BudgetConfig`):
            The settings.
        output_dir (`str` or `Path`):
            The folder of the run.
        store (`str` or `Path`, *optional*):
            The checkpoint or the store from which the run goes on.

    Raises:
        [`SettingsError`]: naming the budget, and the file to delete for a new count.
    """
    if args.has_budget and (cause := args.over_budget(spent_before(output_dir, store))):
        file = (Path(output_dir) / LIVE_STORE).with_suffix(".spent")
        count = f"count the ledger of {store} alone" if store else "count from 0"
        raise SettingsError(f"{cause}, so nothing was started: raise the budget, or delete {file} to {count}")


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Raises:
        [`StoreError`]: if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error


def withdraw_manifest(folder: Path) -> None:
    """Delete the manifest, before any other file of the folder changes."""
    (folder / FOLDER / RUN).unlink(missing_ok=True)


def write_manifest(folder: Path, run: Mapping[str, Any], files: Mapping[str, Path]) -> None:
    """Write `run.json` for a folder with a store. In a checkpoint it must be the last file that is written.

    Args:
        folder (`Path`):
            A checkpoint, or a run's folder.
        run (`Mapping[str, Any]`):
            What `describe` tells of the run.
        files (`Mapping[str, Path]`):
            What to list, by name: all files of a checkpoint. Each is on the disk when the manifest is.

    Raises:
        `OSError`: if it cannot be written.
    """
    for path in files.values():
        sync(path)
    listed = {name: fingerprint(path) for name, path in files.items()}
    manifest = {"format": VERSION, **run, "store_sha256": hash_file(folder / FOLDER / STORE), "files": listed}
    with replacing(folder / FOLDER / RUN) as draft:
        draft.write_text(json.dumps(manifest, indent=1) + "\n")
    for changed in (folder / FOLDER, folder):
        sync(changed)


def identity(args: RankBufferConfig, method: RewardMethod, judge: Judge, queries: QueryTable) -> dict[str, Any]:
    """Return what buffers depend on, as a checkpoint's `run.json` has it."""
    found = {
        "method": args.method,
        "method_args": dataclasses.asdict(method),
        "judge": args.judge_client or args.judge_model or type(judge.client).__name__,
        "judge_args": (args.judge_client_args or {}) if args.judge_client else None,
        "judge_guard": args.judge_guard,
        "format_check": args.format_check,
        "rubric_dropout": None,  # a setting that is gone: a checkpoint of a run that used it is another run
        "judge_view": None if args.judge_view == "answer" else [args.judge_view, args.judge_view_limit],
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
    """Return what `run.json` tells of a run: project version, identity, step, ledger totals and all settings.

    `identity` may hold more, such as the names of policy and data. Since a checkpoint may be published, addresses of
    servers and tokens for the Hub are left out, and an absolute path is its last part.
    """
    settings = {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in args.to_dict().items()
        if not key.endswith(PRIVATE)
    }
    sums = {phase: total.as_dict() for phase, total in totals.items()}
    described = {"rankbuffer_trl": __version__, "step": step, **identity, "totals": sums, "config": settings}
    return json.loads(json.dumps(described, default=str))


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return one line for everything that a checkpoint and a run do not have in common.

    An argument that one of them does not name had its default.
    """
    config, classes = saved.get("config", {}), {"method_args": find_method(current["method"])}
    if client := config.get("judge_client"):  # in an older manifest, `judge` has the arguments too
        saved = {**saved, "judge": client, "judge_args": config.get("judge_client_args") or {}}
    if current.get("judge_args") is not None:
        classes["judge_args"] = load_path(current["judge"])

    def compared(run: Mapping[str, Any], key: str) -> Any:
        value = run.get(key)
        return changed_arguments(classes[key], value) if key in classes and isinstance(value, dict) else value

    return [
        f"{key} ({meaning}): {saved.get(key)!r} in the checkpoint, {current.get(key)!r} now"
        for key, meaning in BINDING.items()
        if compared(saved, key) != compared(current, key)
    ]


def check_trusted(checkpoint: Path, output_dir: str | os.PathLike, trusted: bool) -> None:
    """Refuse a DeepSpeed or FSDP checkpoint from elsewhere, unless the user trusts it.

    DeepSpeed loads its folder `global_step<N>`, and FSDP the files `.metadata` of its folders, with pickle, which
    executes code that the files contain. All other files of a checkpoint are read without executing code. A checkpoint
    is from elsewhere if it is not a folder `checkpoint-<N>` in `output_dir`, or if `hf download` put it there.

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
    # `hf download --local-dir` keeps a record of each file that it wrote, in the folder that it is given.
    record = Path(".cache", "huggingface", "download")
    downloaded = any((folder / record / real.relative_to(folder)).exists() for folder in (real, *real.parents))
    own = real.parent == home and real.name.removeprefix("checkpoint-").isdigit() and not downloaded
    if not trusted and not own and any((*real.glob("global_step*"), *real.glob("*/.metadata"))):
        raise StoreError(
            f"{checkpoint} is a DeepSpeed or FSDP checkpoint that this output_dir did not write, and loading it would"
            " execute code that it contains: set trust_checkpoint to true if you trust its author"
        )
