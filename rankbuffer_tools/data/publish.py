"""The data card of a training set for the Hub, which says how the set was made."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from rankbuffer_trl.monitoring import Markdown, code, escaped, fill_card

from .rubrics import SYSTEM, USER

DATASET_CARD_TEMPLATE = Path(__file__).with_name("card.md")
HIDDEN = ("step", "cost", "ranking_cost")


def make_card(repo_id: str, file_name: str, rows: list[dict], steps: list[dict]) -> str:
    """Write the data card of a training set, whose rows may have no rubrics.

    Args:
        steps (`list[dict]`):
            The steps that made the set ([`read_provenance`]); an empty list if there is no record.
    """
    name = repo_id.rpartition("/")[2]
    steps = [step for step in steps if step.get("queries_without") != 0]  # the others found nothing to make
    models = Counter(model for row in rows for model in row.get("models") or ())
    made = [step for step in steps if step["step"] == "rubrics"]
    rubrics = sum(len(row.get("rubrics") or ()) for row in rows)
    data = DatasetCardData(
        pretty_name=name,
        license="other",
        task_categories=["text-generation"],
        tags=["rankbuffer", "rubrics"] if rubrics else ["rankbuffer"],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": file_name}]}],
    )
    card = fill_card(
        DATASET_CARD_TEMPLATE,
        data,
        name=name,
        queries=f"{len(rows):,}",
        rubrics=f"{rubrics:,}" if rubrics else "",
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
