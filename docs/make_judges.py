"""Write the table of judges into `docs/judges.md`, from the cards in `docs/judges/`.

    python docs/make_judges.py

`tests/test_docs.py` fails if the page is not what this program prints.
"""

import json
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

PAGE = Path(__file__).with_name("judges.md")
CARDS = Path(__file__).with_name("judges")
BEGIN, END = "<!-- python docs/make_judges.py writes this table -->\n", "<!-- end -->\n"
NAMES = "judge queries malformed lists flips put_back ties".split()
NAMES += "greedy_verdicts by_probabilities preference position_bias train_with".split()
HEAD = f"| {' | '.join(name.replace('_', ' ') for name in NAMES)} |\n|---|{'---:|' * 10}---|\n"
COLUMNS = ("lists_tau", "pairs_flip", "put_back", "ratings_tied", "soft_words", "soft_pairs_ratings", "soft_opinion")


def row_of(card: dict) -> str:
    """Return the row of a card."""

    def cell(name: str) -> str:
        value = card["measures"].get(name, [None])[0]
        return "" if value is None else f"{Decimal(str(value)).quantize(Decimal('0.01'), ROUND_HALF_UP)}"

    place = " ± ".join(filter(None, map(cell, ("soft_place", "soft_place_spread"))))
    how = f"`{card['judge']}`, {card['decoding']}" + ("" if card["guard"] else ", no guard")
    cells = [how, str(card["queries"]), f"{card['malformed']} of {card['questions']}", *map(cell, COLUMNS), place]
    recipe = card["train_with"]
    return f"| {' | '.join([*cells, f'`{recipe}`' if recipe else 'nothing'])} |\n"


def page() -> str:
    """Return the page with the table of all cards, by name."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    cards = [json.loads(path.read_text()) for path in sorted(CARDS.glob("*.json"))]
    return before + BEGIN + HEAD + "".join(map(row_of, cards)) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
