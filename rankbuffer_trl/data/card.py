"""The data card of a training set, written from the reports of the steps that made it."""

import json
from collections import Counter
from pathlib import Path

from ..judge.questions import fill
from .rubrics import SYSTEM, USER

TEMPLATE = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
NECTAR = (
    "Queries, responses and ranks come from Nectar (`berkeley-nest/Nectar`). Its card names Apache-2.0 and adds the"
    " conditions of the models that wrote and ranked the responses (OpenAI's and Llama's terms among them) and of the"
    " data sets that the queries were taken from. Check that card before you use or pass this on; the conditions hold"
    " for this set too."
)
OWN = "Queries come from `{source}`. Whoever publishes this set adds their licence here."
MODEL = "Text by `{model}` ({part}) is subject to that model's terms."
PROMPTS = """\
The rubric prompts are those of the paper *RankBuffer: Efficient Ranking-Based Rewards for Open-Ended Generation*,
appendix "Rubric Generation". The system prompt:

```text
{SYSTEM}
```

The user prompt:

```text
{USER}
```"""
GENERIC = "Queries without rubrics of their own got the same generic ones; no model wrote these."
UNKNOWN = "The rubrics were there before; nothing is recorded of who wrote them."
HIDDEN = ("step", "cost", "ranking_cost")


def make_card(repo_id: str, file_name: str, rows: list[dict], steps: list[dict]) -> str:
    """The card.

    Args:
        repo_id (`str`):
            The data set on the Hub.
        file_name (`str`):
            The file in it.
        rows (`list[dict]`):
            Its rows.
        steps (`list[dict]`):
            How it was made ([`read_report`]); none if nobody knows.
    """
    return fill(
        TEMPLATE,
        {
            "{NAME}": repo_id.rpartition("/")[2],
            "{FILE}": file_name,
            "{COUNTS}": counts(rows),
            "{STEPS}": "\n".join(map(shown, steps)) or "There is no report of how it was made.",
            "{SOURCES}": "\n\n".join(sources(steps)) or OWN.format(source="an unknown source"),
            "{RUBRICS}": rubrics(steps),
        },
    )


def counts(rows: list[dict]) -> str:
    """How many of what."""
    rubrics = sum(len(row.get("rubrics") or ()) for row in rows)
    responses = sum(len(row.get("responses") or ()) for row in rows)
    text = f"{len(rows):,} queries, {rubrics:,} rubrics, {responses:,} responses."
    models = Counter(model for row in rows for model in row.get("models") or ())
    if models:
        text += " Responses by model: " + ", ".join(f"{model} {n:,}" for model, n in models.most_common()) + "."
    return text


def shown(step: dict) -> str:
    """One step with its settings, seed and counts."""
    settings = {key: value for key, value in step.items() if key not in HIDDEN and value is not None}
    values = ", ".join(f"{key} `{json.dumps(value, ensure_ascii=False)}`" for key, value in settings.items())
    return f"- {step['step']}: {values}"


def rubrics(steps: list[dict]) -> str:
    """Where the rubrics come from."""
    made = [step for step in steps if step["step"] == "rubrics"]
    said = [GENERIC] if any(step.get("generic") for step in made) else []
    if any(step.get("model") for step in made):
        said.append(fill(PROMPTS, {"{SYSTEM}": SYSTEM, "{USER}": USER}))
    return "\n\n".join(said) or UNKNOWN


def sources(steps: list[dict]) -> list[str]:
    """Whose work is in it, and under which conditions."""
    said = []
    for place, step in enumerate(steps):
        if step["step"] == "nectar":
            said.append(NECTAR)
        elif place == 0:
            said.append(OWN.format(source=step["dataset_name"]))
        if step.get("model"):
            said.append(MODEL.format(model=step["model"], part=step["step"]))
    return said
