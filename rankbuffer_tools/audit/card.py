"""The card of a judge: what an audit on the public set found, small enough to be compared with other judges. Ours.

The public set is everyday queries with eight samples each of a policy of 135M parameters, so all cards are about the
same questions. `docs/judges.md` is the table of all cards.
"""

import json
import re
from pathlib import Path
from typing import Any

from rankbuffer_trl.errors import SettingsError
from rankbuffer_trl.files import write_whole

from .results import Audit

ROOT = Path(__file__).parents[2]
DATASET, SAMPLES = "recipes/small/everyday.jsonl", "experiments/real_judge/audit_samples.jsonl"  # the public set
CARD_RESULTS = (
    *("lists_tau", "pairs_flip", "pairs_first", "pairs_lists", "put_back", "ratings_lists", "ratings_tied"),
    *("padded", "soft_pairs_ratings", "soft_words", "soft_gain", "soft_opinion", "soft_place", "soft_place_spread"),
)


def check_card(name: str) -> None:
    """Refuse a name that is no file name, and a package without the public set."""
    if not re.fullmatch(r"[\w.-]{1,80}", name, re.ASCII) or name.startswith("."):  # it becomes the name of a file
        raise SettingsError(f"card must be the name of the judge in letters, digits, '.', '-' and '_', got {name!r}")
    if not (ROOT / SAMPLES).is_file():
        raise SettingsError("card needs the public set, which a clone of the repository has and the package has not")


def card_of(audit: Audit, name: str, decoding: str, guard: bool) -> dict[str, Any]:
    """Return the card of a judge, which has the name that is given."""
    kinds = {cost.kind: cost for cost in audit.costs}
    return {
        "judge": name,  # a card is published, so it holds no address and no path
        "decoding": decoding,
        "guard": guard,
        "queries": len(audit.rankings),
        "questions": sum(cost.form.questions for cost in audit.costs),
        "malformed": sum(cost.form.first_malformed for cost in audit.costs),
        "verdict": audit.as_dict()["verdict"],
        "measures": {
            result.name: [None if each is None else round(each, 3) for each in (result.value, result.low, result.high)]
            for result in audit.results
            if result.name in CARD_RESULTS
        },
        "soft_noise": audit.soft_noise and round(audit.soft_noise, 3),
        "tokens": {kind: [round(cost.prompt_tokens), round(cost.completion_tokens)] for kind, cost in kinds.items()},
        "train_with": audit.train_with,
    }


def write_judge_card(folder: Path, card: dict[str, Any]) -> Path:
    """Write a card into a folder, and return its path."""
    file = folder / f"{card['judge']}.json"
    text = json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False)
    lists = re.compile(r"\[\s+([^][]*?)\s+\]")  # each in one line
    write_whole(file, lists.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n")
    return file
