"""A folder that stands in for the Hub. It replaces the client that the trainer of transformers uses."""

import inspect
import shutil
from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects


class FolderHub:
    """A stand-in for [`HfApi`] that works at once, in the folder `root`. A call must fit the real client's signature.

    Args:
        root (`Path`):
            Holds a folder per repository.
    """

    def __init__(self, root: Path):
        self.root = root
        self.uploads: list[tuple[str, str]] = []

    def _bind(self, name: str, values: dict) -> dict:
        bound = inspect.signature(getattr(HfApi, name)).bind(self, **values)
        bound.apply_defaults()
        return bound.arguments

    def create_repo(self, repo_id: str, **kwargs) -> SimpleNamespace:
        self._bind("create_repo", {"repo_id": repo_id, **kwargs})
        repo_id = repo_id if "/" in repo_id else f"somebody/{repo_id}"
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, **kwargs) -> Future | None:
        call = self._bind("upload_folder", kwargs)
        source = Path(call["folder_path"])
        files = [str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
        target = self.root / call["repo_id"] / (call["path_in_repo"] or "")
        for name in filter_repo_objects(files, ignore_patterns=call["ignore_patterns"]):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
        self.uploads.append((call["path_in_repo"] or "", call["commit_message"]))
        if not call["run_as_future"]:
            return None
        done = Future()
        done.set_result(None)
        return done

    def snapshot_download(self, repo_id: str, local_dir: Path, allow_patterns: str = "*") -> None:
        """Copy files of a repository to a local folder, as `hf download` does."""
        source = self.root / repo_id
        for path in source.rglob("*"):
            name = path.relative_to(source)
            if path.is_file() and fnmatch(str(name), allow_patterns):
                (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, local_dir / name)

    def files(self, repo_id: str) -> set[str]:
        """Return the names of all files of a repository."""
        repo = self.root / repo_id
        return {str(path.relative_to(repo)) for path in repo.rglob("*") if path.is_file()}
