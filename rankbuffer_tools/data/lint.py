"""Warn of rubrics that a policy may please without being better, or that a judge may read in two ways.

These are plain heuristics for English. `rankbuffer-data check` prints what they find, and docs/data.md says what they
miss.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from rankbuffer_trl.groups import Rubric
from rankbuffer_trl.stems import content_stems

PRESENCE = re.compile(
    r"(?:(?:the |an? )?(?:answer|response|reply) )?(?:mentions?|includes?|names?|lists?|contains?|cites?)\b", re.I
)
JOINED = re.compile(r";|(?<!\d) and\b", re.IGNORECASE)
ALIKE = 0.6  # share of the content words of two rubrics that both have

THERE, TWO, SAME = "asks only whether something is there", "asks two things at once", "is nearly that of another one"


def odd_rubrics(rubrics: Sequence[Rubric]) -> Iterator[str]:
    """Yield `THERE`, `TWO` and `SAME`, each if it holds for a rubric of the query."""
    if any(rubric.weight > 0 and PRESENCE.match(rubric.text.strip()) for rubric in rubrics):
        yield THERE
    if any(JOINED.search(rubric.text.partition(":")[0]) for rubric in rubrics):
        yield TWO
    words = [{*content_stems(rubric.text.lower())} for rubric in rubrics]
    if any(len(one & other) >= ALIKE * len(one | other) > 0 for one, other in combinations(words, 2)):
        yield SAME
