"""A training set to the Hub, with its card."""

from pathlib import Path

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, HfApi

from .card import make_card
from .files import beside, read_report
from .queries import DataError, checked, load_queries


def push(path: str, repo_id: str, private: bool = True, api: HfApi | None = None) -> str:
    """Push a finished training set, its report and its card in one commit.

    Args:
        path (`str`):
            The `.jsonl`, `.json` or `.parquet` file.
        repo_id (`str`):
            Where to, `<user>/<name>`. It is made if it is not there.
        private (`bool`, *optional*, defaults to `True`):
            Whether a new one is for its owner alone.
        api (`HfApi`, *optional*):
            The Hub. Default: as whom `hf auth login` has logged in.

    Returns:
        `str`: the address of the commit.

    Raises:
        [`DataError`]: if the set is not ready to train on, or the Hub refuses or cannot be reached.
    """
    rows = list(checked(load_queries(path)))
    name = f"train{Path(path).suffix}"
    files: dict[str, bytes | str] = {
        name: path,
        "README.md": make_card(repo_id, name, rows, read_report(path)).encode(),
    }
    report = beside(Path(path), "report.json")
    if report.is_file():
        files["report.json"] = str(report)
    api = api or HfApi()
    try:
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            repo_type="dataset",
            operations=[CommitOperationAdd(path_in_repo=at, path_or_fileobj=what) for at, what in files.items()],
            commit_message=f"{len(rows)} queries",
        )
    except (HTTPError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be pushed to {repo_id}: {error}") from error
    return str(commit.commit_url)
