"""Which files make a checkpoint whole, and whether a run may resume from it.

The manifest is the last file of a checkpoint that is written. It says which run and step the checkpoint belongs to,
and lists all other files.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainingArguments

from .. import __version__
from ..decoding import read_json_as
from ..files import fingerprint, sync, write_whole
from .manifest import (
    FOLDER,
    FORMAT,
    RUN,
    STATE,
    CheckpointError,
    Manifest,
    checkpoint_step,
    checkpoints,
    read_manifest,
    read_state,
)

logger = get_logger(__name__)

TORN, OLD = "_torn", "_old"  # the Hub upload skips names that begin with an underscore
# How the names of settings end that a published checkpoint does not hold.
PRIVATE = ("_url", "_host", "_token", "_headers", "_command")


class Checkpoints:
    """The checkpoints of a run's folder.

    Args:
        file (`str`):
            The file of the run's state, by its name in the manifest: a checkpoint without it is none.
    """

    def __init__(self, output_dir: str | os.PathLike, file: str):
        self.folder = Path(output_dir)
        self.file = file
        self._faults: dict[Path, str | None] = {}  # each is read once, since it may have many gigabytes

    def fault(self, checkpoint: Path) -> str | None:
        """Return what is wrong with a checkpoint, `None` if it is whole and all of it was saved at one step."""
        place = checkpoint.resolve()
        if place not in self._faults:
            self._faults[place] = why_torn(checkpoint, self.file)
        return self._faults[place]

    def newest(self) -> Path:
        """Return the whole checkpoint with the highest step. Skip torn ones above it, and log each."""
        for _, path in checkpoints(self.folder):
            torn = self.fault(path)
            if torn is None:
                return path
            logger.warning(f"skipping {path}, which is not a whole checkpoint: {torn}")
        raise CheckpointError(f"no whole checkpoint in {self.folder} to resume from")

    def find(self, resume: str | bool | Path) -> tuple[Path, Manifest]:
        """Return a whole checkpoint and its manifest: that of a path, or the newest one for `True`."""
        path = self.newest() if resume is True else Path(str(resume))
        if not path.is_dir():
            known = ", ".join(each.name for _, each in checkpoints(self.folder)) or "no checkpoint"
            raise CheckpointError(f"there is no folder {path}: {self.folder} has {known}, and true takes the newest")
        if torn := self.fault(path):
            raise CheckpointError(f"{path} is not a whole checkpoint: {torn}")
        return path, read_manifest(path)

    def resumable(
        self, resume: Path, differences: Callable[[Manifest], list[str]], processes: int, with_changes: bool
    ) -> tuple[Path, int]:
        """Return a checkpoint and its step. Refuse one that is damaged, or of another run unless changes are allowed.

        Args:
            resume (`Path`):
                The folder of the checkpoint.
            differences (`Callable[[Manifest], list[str]]`):
                Names all that this run and the one that was saved do not have in common.
            processes (`int`):
                The number of processes now.
            with_changes (`bool`):
                Whether a checkpoint of another run is taken.
        """
        path, saved = self.find(resume)
        if hash_file(path / self.file) != saved["store_sha256"]:  # in full: of a large file, `files` has only samples
            raise CheckpointError(
                f"{path / self.file} is damaged: its SHA-256 is not the one in {RUN}. Resume from another checkpoint"
            )
        changed = differences(saved)
        if not with_changes:
            check_unchanged(path, changed)
        elif changed:
            logger.warning(another_run(path, changed))
        if saved["processes"] != processes:
            logger.warning(
                f"{path} was saved by {saved['processes']} processes, now there are {processes}: queries are visited"
                " in the same order, but sampled rollouts will differ"
            )
        return path, saved["step"]

    def set_torn_aside(self) -> None:
        # Else `save_total_limit` may keep a torn one for a whole one.
        for _, path in checkpoints(self.folder):
            if self.fault(path) is not None:
                set_aside(path, TORN)

    def set_old_aside(self, step: int) -> None:
        # They are those above the step where the run starts, and look like the newest ones of this run.
        old = [path for number, path in checkpoints(self.folder) if number > step]
        for path in old:
            set_aside(path, OLD)
        if old:
            names = ", ".join(path.name for path in old)
            logger.warning(f"{self.folder}: moved to {OLD}/, since this run starts at step {step}: {names}")


def why_torn(checkpoint: Path, file: str) -> str | None:
    """Return what is wrong with a checkpoint, `None` if it is whole. `file` is that of [`Checkpoints`]."""
    try:
        run = read_manifest(checkpoint)
        state = read_state(checkpoint)
    except ValueError as error:
        return str(error)
    if run["config"].get("save_only_model"):
        return "it was saved with save_only_model, so it has no optimizer"
    steps = {RUN: run["step"], STATE: state.get("global_step")}
    if (named := checkpoint_step(checkpoint)) is not None:  # a folder from the Hub may have any name
        steps["its name"] = named
    if any(step != run["step"] for step in steps.values()):
        return "it is mixed from several steps: " + ", ".join(f"{what} says {step!r}" for what, step in steps.items())
    for name in (STATE, file):  # a run's own folder, which has no optimizer, lists its state alone
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
    files.pop(f"{FOLDER}/{RUN}", None)  # the manifest cannot hold its own digest
    return files


def set_aside(checkpoint: Path, folder: str) -> None:
    """Move a checkpoint into another folder of its parent."""
    # An earlier run may have left one of that name.
    names = (checkpoint.parent / folder / f"{checkpoint.name}.{number}" for number in count())
    (checkpoint.parent / folder).mkdir(exist_ok=True)
    checkpoint.rename(next(name for name in names if not name.exists()))


def delete_oldest(output_dir: str | os.PathLike, limit: int | None, best: str | None) -> None:
    """Delete the checkpoints with the lowest steps until `limit` are left. Keep the newest and the best."""
    # The function of transformers would also count and delete folders such as `checkpoint-3-copy`.
    newest_first = [path for _, path in checkpoints(output_dir)]
    kept = [path for path in newest_first if path == newest_first[0] or path == Path(best or "")]
    older = [path for path in newest_first if path not in kept]
    if limit is not None and limit > 0:
        for path in older[max(limit - len(kept), 0) :]:
            shutil.rmtree(path, ignore_errors=True)


def check_not_uploaded(checkpoint: Path, output_dir: str | os.PathLike) -> None:
    """Refuse a checkpoint in `output_dir` that each push would upload over the newest one on the Hub."""
    home = Path(output_dir).resolve()
    if not checkpoint.resolve().is_relative_to(home):
        return
    first = next(iter(checkpoint.resolve().relative_to(home).parts), "")
    if not first.startswith(("_", "checkpoint-")):  # the trainer uploads neither
        raise CheckpointError(
            f"{checkpoint} lies in output_dir, so every push would upload it again, over a newer one on the Hub: move"
            f" it into {Path(output_dir) / '_from_hub'} (names that begin with an underscore stay here)"
        )


def check_trusted(checkpoint: Path, output_dir: str | os.PathLike, trusted: bool) -> None:
    """Refuse a DeepSpeed or FSDP checkpoint from elsewhere, unless the user trusts it."""
    real, home = checkpoint.resolve(), Path(output_dir).resolve()
    # `hf download --local-dir` keeps a record of each file that it wrote, in the folder that it is given.
    record = Path(".cache", "huggingface", "download")
    downloaded = any((folder / record / real.relative_to(folder)).exists() for folder in (real, *real.parents))
    own = real.parent == home and real.name.removeprefix("checkpoint-").isdigit() and not downloaded
    # DeepSpeed loads its folder `global_step<N>`, and FSDP the files `.metadata` of its folders, with pickle, which
    # executes code that the files contain. All other files of a checkpoint are read without executing code.
    if not trusted and not own and any((*real.glob("global_step*"), *real.glob("*/.metadata"))):
        raise CheckpointError(
            f"{checkpoint} is a DeepSpeed or FSDP checkpoint that this output_dir did not write, and loading it would"
            " execute code that it contains: set trust_checkpoint to true if you trust its author"
        )


def check_unchanged(checkpoint: Path, changed: Sequence[str]) -> None:
    """Refuse a checkpoint of another run. `changed` has a line for each thing that the two do not have in common."""
    if changed:
        raise CheckpointError(
            f"{another_run(checkpoint, changed)}\nFor a new run, name another output_dir. To resume from it anyway, so"
            " that its buffers are of both settings, set resume_with_changes to true"
        )


def another_run(checkpoint: Path, changed: Sequence[str]) -> str:
    return "\n  ".join((f"{checkpoint} belongs to another run:", *changed))


BASE, TARGETS = "base_model_name_or_path", "target_modules"
# What a checkpoint says of its adapter and that may change: it is about loading or about the next steps alone.
FREE = ("auto_mapping", "inference_mode", "init_lora_weights", "lora_dropout", "peft_version", "revision")


def policy_differences(
    checkpoint: Path, saved: Manifest, args: TrainingArguments, adapter: Mapping[str, Any] | None
) -> list[str]:
    """Return one line for everything that the trained weights of a checkpoint and of a run do not have in common.

    All weights come from the checkpoint, but an adapter stands on the policy that the run names, with its own scale.

    Args:
        saved (`Manifest`):
            The manifest of the checkpoint.
        adapter (`Mapping[str, Any]`, *optional*):
            The settings of the run's adapter, as peft names them.

    Raises:
        [`CheckpointError`]: if one has all weights, and the other one an adapter.
    """
    file, kinds = checkpoint / "adapter_config.json", ("all weights", "an adapter (use_peft)")
    known = file.exists() or (checkpoint / "config.json").exists()  # shards of FSDP have neither
    if known and file.exists() is (adapter is None):
        raise CheckpointError(
            f"{checkpoint} has {kinds[file.exists()]}, and this run trains {kinds[adapter is not None]}: resume with"
            " the settings that the run began with"
        )
    optim = args.to_dict()["optim"]
    pairs = {"optim": (saved["config"].get("optim", optim), optim)}
    if adapter is not None and known:
        then = read_json_as(file, dict[str, Any])
        now = json.loads(json.dumps(adapter, default=lambda value: [*value] if isinstance(value, set) else str(value)))
        pairs |= {key: (then[key], now[key]) for key in then if key in now and key not in FREE}
    return [
        f"{key}: {old!r} in the checkpoint, {new!r} now"
        for key, (old, new) in pairs.items()
        if not same_setting(key, old, new)
    ]


OF_OPTIMIZER = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


def without_effect(saved: Manifest, args: TrainingArguments) -> list[str]:
    """Return one line for each setting of a run that has no effect, because the optimizer is the checkpoint's."""
    now = args.to_dict()
    pairs = {key: (saved["config"].get(key, now[key]), now[key]) for key in OF_OPTIMIZER}
    return [
        f"{key} stays {old}, and {new} has no effect, because the optimizer is that of the checkpoint"
        for key, (old, new) in pairs.items()
        if old != new
    ]


def same_setting(key: str, old: Any, new: Any) -> bool:
    """Whether two settings of a policy are one. A base policy may have moved to a folder of the same name."""
    if key == BASE and old and new:
        then, now = Path(old), Path(new)
        moved = now.is_dir() and not then.is_dir() and then.name == now.name
        return moved or then.resolve() == now.resolve()
    if isinstance(old, list) and isinstance(new, list):
        return sorted(map(str, old)) == sorted(map(str, new))
    # A pattern of names becomes a list once the policy is loaded.
    return old == new or (key == TARGETS and isinstance(old, list))


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_manifest(folder: Path, run: Mapping[str, Any], state: str, files: Mapping[str, Path]) -> None:
    """Write `run.json` for a folder with the state of a run, as the last file of a checkpoint.

    Args:
        run (`Mapping[str, Any]`):
            What `describe` tells of the run.
        state (`str`):
            The file of the run's state, by its name in the manifest.
        files (`Mapping[str, Path]`):
            What to list, by name: all files of a checkpoint.
    """
    for path in files.values():
        sync(path)  # each is on the disk before the manifest says so
    listed = {name: fingerprint(path) for name, path in files.items()}
    manifest = {"format": FORMAT, **run, "store_sha256": hash_file(folder / state), "files": listed}
    write_whole(folder / FOLDER / RUN, json.dumps(manifest, indent=1) + "\n")
    for changed in (folder / FOLDER, folder):  # so that the new names are on the disk too
        sync(changed)


def describe(facts: Mapping[str, Any], step: int, args: TrainingArguments) -> dict[str, Any]:
    """Return what `run.json` tells of a run: version, step, processes, what its state tells, and most settings."""
    own_facts = {"rankbuffer_trl": __version__, "step": step, "processes": args.world_size}
    return json.loads(json.dumps({**own_facts, **facts, "config": publishable(args.to_dict())}, default=str))


def publishable(setting: Any) -> Any:
    """Return a setting as a published checkpoint may hold it."""
    if isinstance(setting, Mapping):  # without addresses of servers and tokens
        return {key: publishable(value) for key, value in setting.items() if not str(key).endswith(PRIVATE)}
    # What is published names no folder of this machine.
    return Path(setting).name if isinstance(setting, str) and Path(setting).is_absolute() else setting
