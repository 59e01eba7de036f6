"""Publish a training set on the Hub, with a data card that says how it was made."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from httpx import HTTPError
from huggingface_hub import CommitOperationAdd, DatasetCardData, HfApi
from huggingface_hub.errors import HFValidationError

from ..cards import Markdown, code, escaped, fill_card
from .output import beside, read_provenance
from .queries import DataError, checked, load_queries
from .rubrics import SYSTEM, USER

TEMPLATE = Path(__file__).with_name("card.md")
HIDDEN = ("step", "cost", "ranking_cost")


def push(path: str, repo_id: str, private: bool = True, api: HfApi | None = None) -> str:
    """Push a finished training set, its provenance and its card in one commit.

    Args:
        path (`str`):
            The `.jsonl`, `.json` or `.parquet` file.
        repo_id (`str`):
            The data set on the Hub, `<user>/<name>`. It is created if it does not exist.
        private (`bool`, *optional*, defaults to `True`):
            Whether a new data set is visible to its owner only.
        api (`HfApi`, *optional*):
            The client of the Hub. Default: one with the login of `hf auth login`.

    Returns:
        `str`: the address of the commit.

    Raises:
        [`DataError`]: if the set is not ready to train on, or the Hub refuses or cannot be reached.
    """
    rows = list(checked(load_queries(path)))
    name = f"train{Path(path).suffix}"
    card = make_card(repo_id, name, rows, read_provenance(path))
    files: dict[str, bytes | str] = {name: path, "README.md": card.encode()}
    provenance = beside(Path(path), "provenance.json")
    if provenance.is_file():
        files["provenance.json"] = str(provenance)
    api = api or HfApi()
    try:
        api.create_repo(repo_id, repo_type="dataset", private=private, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            repo_type="dataset",
            operations=[CommitOperationAdd(path_in_repo=at, path_or_fileobj=what) for at, what in files.items()],
            commit_message=f"{len(rows)} queries",
        )
    except (HTTPError, HFValidationError, OSError) as error:
        raise DataError(f"{path} cannot be pushed to {repo_id}: {error}") from error
    return str(commit.commit_url)


def make_card(repo_id: str, file_name: str, rows: list[dict], steps: list[dict]) -> str:
    """Write the data card of a training set.

    Args:
        repo_id (`str`):
            The data set on the Hub.
        file_name (`str`):
            The file in it.
        rows (`list[dict]`):
            The rows of the set.
        steps (`list[dict]`):
            The steps that made the set ([`read_provenance`]); an empty list if there is no record.
    """
    name = repo_id.rpartition("/")[2]
    models = Counter(model for row in rows for model in row.get("models") or ())
    made = [step for step in steps if step["step"] == "rubrics"]
    data = DatasetCardData(
        pretty_name=name,
        license="other",
        task_categories=["text-generation"],
        tags=["rankbuffer", "rubrics"],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": file_name}]}],
    )
    card = fill_card(
        TEMPLATE,
        data,
        name=name,
        queries=f"{len(rows):,}",
        rubrics=f"{sum(len(row.get('rubrics') or ()) for row in rows):,}",
        responses=f"{sum(len(row.get('responses') or ()) for row in rows):,}",
        models=", ".join(f"{model} {n:,}" for model, n in models.most_common()),
        steps=[step | {"settings": settings_text(step)} for step in steps],
        nectar=any(step["step"] == "nectar" for step in steps),
        source=next((step["dataset_name"] for step in steps[:1] if "dataset_name" in step), "an unknown source"),
        generic=any(step.get("generic") for step in made),
        written=any(step.get("model") for step in made),
        system=Markdown(SYSTEM),
        user=Markdown(USER),
    )
    return card.rstrip() + "\n"


def settings_text(step: dict[str, Any]) -> Markdown:
    """List the settings, seed and counts of one step."""
    settings = {key: value for key, value in step.items() if key not in HIDDEN and value is not None}
    shown = (f"{escaped(key)} {code(json.dumps(value, ensure_ascii=False))}" for key, value in settings.items())
    return Markdown(", ".join(shown))
