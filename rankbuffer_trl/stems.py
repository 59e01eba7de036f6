"""The words of a text by their stems, so that `rinsing` is `rinse`."""

import re
from functools import lru_cache

WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
# Words that a rubric uses to talk about a response. A response need not repeat them.
RUBRIC_WORDS = frozenset(
    "a about all an and answer any are as at be by can does each explains for from gives has how if in is it its "
    "lists long makes mentions name names needed no not of on or order reader recommends response say says should "
    "steps tells than that the them then they this to uses well what when where which while who why with word "
    "words you your".split()
)


def content_stems(text: str) -> tuple[str, ...]:
    """Return the stems of the words of `text` that are not in `RUBRIC_WORDS`."""
    return tuple(stem(word) for word in WORD.findall(text) if word not in RUBRIC_WORDS)


@lru_cache(maxsize=256)  # a response is read once for each rubric
def stem_all(text: str) -> tuple[str, ...]:
    """Return the stems of all words of `text`, in order."""
    return tuple(map(stem, WORD.findall(text.lower())))


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """Return a crude stem: `stirred`, `stirring` and `stirs` give `stir`; `rinsing` and `rinse` give `rins`."""
    word = word.removesuffix("'s")
    for suffix in ("ing", "ed", "es", "s", "ly", "e"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3 and not word.endswith("ss"):
            word = word[: -len(suffix)]
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word
