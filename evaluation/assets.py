"""Official files: found in the user's folder, checked by sha256, never part of this project."""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from rankbuffer_trl.errors import RankBufferError

MANIFEST = Path(__file__).with_name("assets.yaml")


class AssetError(RankBufferError, ValueError):
    """An official file that is missing or not the one meant. The message says which, where, and how to get it."""


class Assets:
    """The official files below one folder.

    Args:
        folder (`str` or `Path`):
            Where they lie.
        manifest (`str` or `Path`, *optional*, defaults to `evaluation/assets.yaml`):
            What belongs where, and the sha256 of each.
    """

    def __init__(self, folder: str | Path, manifest: str | Path = MANIFEST):
        self.folder = Path(folder)
        self.manifest: dict[str, dict[str, dict]] = yaml.safe_load(Path(manifest).read_text(encoding="utf-8"))
        self._checked: dict[tuple[str, str], tuple[Path, str]] = {}

    def path(self, benchmark: str, name: str) -> Path:
        """The checked file `name` of `benchmark`.

        Raises:
            [`AssetError`]: if it is missing or has another sha256.
        """
        if (benchmark, name) not in self._checked:
            self._checked[benchmark, name] = self._find(benchmark, name)
        return self._checked[benchmark, name][0]

    def check(self, benchmark: str, names: Iterable[str]) -> None:
        """Check several files of `benchmark` and complain of all that are wrong at once.

        Raises:
            [`AssetError`]: naming each.
        """
        faults = []
        for name in names:
            try:
                self.path(benchmark, name)
            except AssetError as fault:
                faults.append(str(fault))
        if faults:
            raise AssetError("\n".join(faults))

    def hashes(self, benchmark: str) -> Mapping[str, str]:
        """The sha256 of each file of `benchmark` that was used, the unpinned ones too."""
        return {name: digest for (of, name), (_, digest) in self._checked.items() if of == benchmark}

    def _find(self, benchmark: str, name: str) -> tuple[Path, str]:
        entry = self.manifest[benchmark][name]
        folder = package_folder(entry["package"]) if "package" in entry else self.folder
        candidates = [folder / path for path in entry["path"]]
        found = next((path for path in candidates if path.is_file()), None)
        advice = f"Get it with: {entry['source'].replace('ASSETS', str(self.folder))}"
        if found is None:
            places = " or ".join(map(str, candidates))
            raise AssetError(f"{benchmark}: the official file {name!r} is missing; it belongs at {places}. {advice}")
        digest = hashlib.sha256(found.read_bytes()).hexdigest()
        if entry["sha256"] not in (digest, None):
            raise AssetError(
                f"{benchmark}: {found} is not the official file {name!r}: its sha256 is {digest}, that of the pinned"
                f" revision is {entry['sha256']}. {advice}"
            )
        return found, digest


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it; a place that does not exist if it is not installed."""
    spec = importlib.util.find_spec(name)
    places = (spec and spec.submodule_search_locations) or [f"(package {name} is not installed)"]
    return Path(places[0])
