"""Official files: found in the user's folder, checked by sha256, never part of this project.

The folder of each benchmark has an `assets.yaml` that lists its files by name:

- `path`: where the file lies below `assets_dir`, or in the installed package `package`. The first path that exists
  is used.
- `sha256`: another file is refused. `null` accepts any file; the results then record which one was used.
- `source`: the command that gets the file.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Required, TypedDict

import yaml

from rankbuffer_trl.decoding import decode
from rankbuffer_trl.errors import RankBufferError


class AssetError(RankBufferError, ValueError):
    """An official file is missing or is a different one. The message says which, where, and how to get it."""


class Entry(TypedDict, total=False):
    """An official file, as the top of this file describes it."""

    path: Required[list[str]]
    sha256: Required[str | None]
    source: Required[str]
    package: str


class Assets:
    """The official files below one folder.

    Args:
        manifest (`str` or `Path`, *optional*):
            A YAML file of entries by benchmark and name, which replace those of the benchmarks' own `assets.yaml`.

    Raises:
        [`AssetError`]: if that file cannot be read, or an entry is not of this form.
    """

    def __init__(self, folder: str | Path, manifest: str | Path | None = None):
        self.folder = Path(folder)
        own = read_yaml(Path(manifest)) if manifest else {}
        try:
            decode(own, dict[str, dict[str, Entry]])
        except ValueError as error:
            raise AssetError(f"the list of official files {manifest} is wrong: {error}") from None
        packaged = {path.parent.name: read_yaml(path) for path in Path(__file__).parent.glob("*/assets.yaml")}
        # A benchmark of another package has its entries in `own` alone.
        self.manifest: dict[str, dict[str, dict]] = own | {
            name: entries | own.get(name, {}) for name, entries in packaged.items()
        }
        self.replaced = own.keys() & packaged.keys()
        self._checked: dict[tuple[str, str], tuple[Path, str]] = {}  # so that each file is hashed once

    def path(self, benchmark: str, name: str) -> Path:
        """Return the path of the file `name` of `benchmark`. Raise [`AssetError`] if it is missing or another."""
        if (benchmark, name) not in self._checked:
            self._checked[benchmark, name] = self._find(benchmark, name)
        return self._checked[benchmark, name][0]

    def check(self, benchmark: str, names: Iterable[str]) -> None:
        """Check several files of `benchmark` and report all faults at once.

        Raises:
            [`AssetError`]: naming each file that is missing or wrong.
        """
        faults = []  # one error for all, so that they can be got at once
        for name in names:
            try:
                self.path(benchmark, name)
            except AssetError as fault:
                faults.append(str(fault))
        if faults:
            raise AssetError("\n".join(faults))

    def hashes(self, benchmark: str) -> Mapping[str, str]:
        """Return the sha256 of each file of `benchmark` that was used, pinned or not."""
        return {name: sha256 for (of, name), (_, sha256) in self._checked.items() if of == benchmark}

    def _find(self, benchmark: str, name: str) -> tuple[Path, str]:
        entry = self.manifest[benchmark][name]
        folder = package_folder(entry["package"]) if "package" in entry else self.folder
        candidates = [folder / path for path in entry["path"]]
        file = next((path for path in candidates if path.is_file()), None)
        advice = f"Get it with: {entry['source'].replace('ASSETS', str(self.folder))}"
        if file is None:
            searched = " or ".join(map(str, candidates))
            raise AssetError(f"{benchmark}: the official file {name!r} is missing; it belongs at {searched}. {advice}")
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        if entry["sha256"] not in (sha256, None):  # null accepts any file
            raise AssetError(
                f"{benchmark}: {file} is not the official file {name!r}: its sha256 is {sha256}, that of the pinned"
                f" revision is {entry['sha256']}. {advice}"
            )
        return file, sha256


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping of a YAML file, or raise [`AssetError`]."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise AssetError(f"the list of official files {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise AssetError(f"the list of official files {path} must be a mapping, not a {type(value).__name__}")
    return value


def package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    # The path of one that is not installed does not exist, and says why.
    places = (spec and spec.submodule_search_locations) or [f"(package {name} is not installed)"]
    return Path(places[0])
