"""The embedded judge, which scores responses against the rubrics of the prompt without a language model.

It reads the same text that an LLM judge gets, finds query, rubrics, anchors and candidates in it, and answers in the
same JSON. A run without a GPU therefore uses every prompt and every parser of a real run. This judge does not
understand meaning. It checks the words of a rubric, so a rubric for it must have one of these forms:

* `Gives the steps in order: rinse, boil, simmer.` The share of the listed terms that appear in this order.
* `Leaves out filler: whatever, stuff, honestly.` The share of the listed terms that are absent.
* `Says what is needed: a pan, salt or stock, two cups.` The share of the listed terms that are present.
  `or` separates alternatives of one term.
* `Is between 12 and 30 words long.` 1 inside the range, less outside: the ratio of length and limit.
* `Is written in complete sentences.` The share of words in sentences with a capital first letter and a final stop.
* `Does not repeat itself.` The share of word trigrams that are new.
* Any other text: the share of the rubric's own content words that the response uses.

Words are compared by their stem, so that `rinsing` satisfies `rinse`.
"""

import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache

from ..stems import WORD, content_stems, stem_all
from ._errors import TransportError
from ._judge import Askable
from ._ledger import Reply, Tally, Usage
from ._probabilities import without_doubt

RUBRIC = re.compile(r"^\d+\.\[weight=(-?\d+)\] (.*)$", re.MULTILINE)


class RubricJudge:
    """A deterministic judge that needs no model: the chat client behind `judge_url: null`.

    The docstring of this module says how it reads a rubric.
    """

    name = "embedded rubric judge"
    model = "rubric-judge"

    async def complete(
        self, messages: Sequence[dict[str, str]], *, question: Askable, seed: int, tally: Tally
    ) -> Reply:
        started = time.perf_counter()
        tally.attempts += 1
        try:
            text, usage = self.answer(messages)
            return Reply(text, usage, logprobs=without_doubt(text) if getattr(question, "soft", False) else None)
        finally:
            tally.seconds += time.perf_counter() - started

    def answer(self, messages: Sequence[dict[str, str]]) -> tuple[str, Usage]:
        """Answer the first user message.

        Raises:
            [`TransportError`]: if the message is not a prompt that this judge can read.
        """
        prompt = next(message["content"] for message in messages if message["role"] == "user")
        try:
            answer = judge(prompt)
        except ValueError as error:
            raise TransportError(str(error)) from error
        return answer, Usage(count_tokens(prompt), 0, count_tokens(answer))

    async def close(self) -> None:
        """Do nothing: this judge has no connections."""


def judge(prompt: str) -> str:
    """Answer any prompt of `_questions.py` in JSON, or raise `ValueError`."""
    if '"keep_anchor_ids"' in prompt[-400:]:  # at the end, where no response stands
        return answer_selection(prompt)
    # The last "Return JSON only" is that of the template. A response that contains these words comes before it.
    body, separator, instruction = prompt.rpartition("\n\nReturn JSON only")
    _, _, body = body.partition("\n\nRUBRICS\n")
    if not separator or not body:
        raise ValueError("the rubric judge got a prompt without RUBRICS or without 'Return JSON only'")
    if ids := re.search(r'\{"order": (\[.*\])\}', instruction):
        rubrics, candidates = split(body, "CANDIDATES")
        texts = dict(reversed(read_blocks(r"R\d+", candidates)))
        scores = {i: rubric_score(texts.get(f"R{i}", ""), rubrics) for i in json.loads(ids.group(1))}
        return json.dumps({"order": sorted(scores, key=lambda i: (scores[i], i))})
    if '{"score":' in instruction:
        rubrics, response = split(body, "RESPONSE")
        [most] = re.findall(r"through (\d+)", instruction)
        return json.dumps({"score": round(int(most) * rubric_score(unquoted(response), rubrics))})
    if '{"winner":' in instruction or '{"scores":' in instruction:
        rubrics, responses = split(body, "RESPONSES")
        of_group = re.search(r"\[<(\d+) integers", instruction)
        n, most = (int(of_group[1]), 100) if of_group else (2, 10)
        blocks = read_blocks(r"[AB]|R\d+", responses)[:n]
        qualities = [rubric_score(text, rubrics) for _, text in blocks]
        if '{"scores":' in instruction:
            return json.dumps({"scores": [round(most * quality) for quality in qualities]})
        first, second = qualities
        tie = "tie" if '"tie"' in instruction else "A"
        return json.dumps({"winner": tie if first == second else blocks[0 if first > second else 1][0]})
    return answer_insertion(body)


def answer_insertion(body: str) -> str:
    rubrics, rest = split(body, "ORDERED ANCHORS (worst to best)")
    anchors_text, separator, candidate = rest.partition("\n\nCANDIDATE\n")
    if not separator:
        raise ValueError("the rubric judge got a prompt without CANDIDATE")
    anchors = [text for _, text in read_blocks(r"A\d+", anchors_text)]
    quality = rubric_score(unquoted(candidate), rubrics)
    if not any(anchors):  # order-only: there is no text to compare with, so guess from the absolute quality
        return json.dumps({"position": min(int(quality * (len(anchors) + 1)), len(anchors))})
    return json.dumps({"position": insertion_position(quality, [rubric_score(text, rubrics) for text in anchors])})


def answer_selection(prompt: str) -> str:
    """Answer a prompt of the LLM buffer: select the responses nearest to four even steps of quality."""
    _, _, body = prompt.partition("\n\nRUBRICS\n")
    rubrics, rest = split(body, "CURRENT ANCHORS [A...] AND RANKED ROLLOUTS [R...] (worst to best)")
    ladder_text, _, _ = rest.partition("\n\nLOOK-AHEAD ROLLOUTS")
    ladder = {name: rubric_score(text, rubrics) for name, text in read_blocks(r"[AR]\d+", ladder_text)}
    low, high = min(ladder.values()), max(ladder.values())
    chosen: list[str] = []
    for step in range(4):
        level = low + (high - low) * step / 3
        chosen.append(min((name for name in ladder if name not in chosen), key=lambda name: abs(ladder[name] - level)))
    keep, add = ([name for name in chosen if name[0] == letter] for letter in "AR")
    return json.dumps({"keep_anchor_ids": keep, "add_rollout_ids": add})


def split(body: str, heading: str) -> tuple[list[tuple[int, str]], str]:
    """Return the rubrics, and the text under `heading` after them."""
    rubrics, separator, rest = body.partition(f"\n\n{heading}\n")
    if not separator:
        raise ValueError(f"the rubric judge got a prompt without {heading}")
    return parse_rubrics(rubrics), rest


def insertion_position(quality: float, anchor_qualities: list[float]) -> int:
    """Return the position in 0..K of a candidate among K anchors, worst to best."""
    # A count, since the order of the anchors may disagree with the rubrics. A candidate that equals the lowest anchor
    # is not worse than it.
    beaten = sum(other < quality for other in anchor_qualities)
    return 1 if beaten == 0 and quality == anchor_qualities[0] and len(anchor_qualities) > 1 else beaten


def parse_rubrics(text: str) -> list[tuple[int, str]]:
    """Return (weight, text) of each `1.[weight=5] text` line."""
    rubrics = [(int(weight), rubric) for weight, rubric in RUBRIC.findall(text)]
    if not rubrics:
        raise ValueError("the rubric judge found no '1.[weight=5] text' line under RUBRICS")
    return rubrics


def read_blocks(names: str, text: str) -> list[tuple[str, str]]:
    """Return name and text of each block under a line such as `[A0]`, in the order of the text."""
    pieces = re.split(rf"^\[({names})\]$", text, flags=re.MULTILINE)[1:]
    return [(name, unquoted(block.strip("\n")).strip()) for name, block in zip(pieces[::2], pieces[1::2], strict=True)]


def unquoted(text: str) -> str:
    """Return a response without the quote marks of a guarded prompt."""
    return re.sub("^> ", "", text, flags=re.MULTILINE)


def rubric_score(response: str, rubrics: list[tuple[int, str]]) -> float:
    """Return the weighted mean of [`meets`] over all rubrics, in [0, 1]."""
    if not response.strip():
        return 0.0
    shares = [(weight, meets(response, rubric)) for weight, rubric in rubrics]
    # A negative weight names a fault.
    earned = sum(weight * share if weight > 0 else -weight * (1 - share) for weight, share in shares)
    return earned / sum(abs(weight) for weight, _ in shares)


def meets(response: str, rubric: str) -> float:
    """Return how far `response` meets `rubric`, in [0, 1]. The docstring of this module lists the forms."""
    lowered = rubric.lower()
    if limits := re.search(r"between (\d+) and (\d+) words", lowered):
        low, high = map(int, limits.groups())
        length = len(WORD.findall(response.lower()))
        return min(1.0, length / max(low, 1), high / max(length, 1))
    if "complete sentences" in lowered:
        return complete_sentences(response)
    if "not repeat" in lowered:
        words = WORD.findall(response.lower())
        trigrams = list(zip(words, words[1:], words[2:], strict=False))
        return len(set(trigrams)) / len(trigrams) if trigrams else 1.0
    stems = stem_all(response)
    terms = read_terms(lowered)
    places = [find(term, stems) for term in terms]
    if "in order" in lowered:
        return longest_rise([place for place in places if place is not None]) / len(terms)
    if lowered.startswith(("leaves out", "avoids")):
        return sum(place is None for place in places) / len(terms)
    return sum(place is not None for place in places) / len(terms)


@lru_cache(maxsize=4096)
def read_terms(rubric: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the terms that `rubric` lists: tuples of choices, which are tuples of stems."""
    _, colon, listed = rubric.partition(":")
    terms: list[tuple[tuple[str, ...], ...]] = []
    for part in re.split(r",|\band\b", listed) if colon else WORD.findall(rubric):
        stems = (content_stems(choice) for choice in re.split(r"\bor\b", part))
        if choices := tuple(choice for choice in stems if choice):
            terms.append(choices)
    if not terms:
        raise ValueError(f"the rubric judge finds nothing to check in the rubric {rubric!r}")
    return tuple(terms)


def find(term: tuple[tuple[str, ...], ...], stems: Sequence[str]) -> int | None:
    """Return the index in `stems` at which a choice of `term` is first complete; `None` if no choice is."""
    places = [max(stems.index(part) for part in choice) for choice in term if all(part in stems for part in choice)]
    return min(places, default=None)


def longest_rise(places: list[int]) -> int:
    """Return the length of the longest strictly rising subsequence of `places`."""
    best: list[int] = []
    for i, place in enumerate(places):
        best.append(1 + max((best[j] for j in range(i) if places[j] < place), default=0))
    return max(best, default=0)


def complete_sentences(text: str) -> float:
    """Return the share of words in complete sentences."""
    good = total = 0
    for sentence in re.findall(r"[^.!?]+[.!?]*", text):
        words = len(WORD.findall(sentence.lower()))
        total += words
        if words >= 3 and sentence.strip()[0].isupper() and sentence.strip()[-1] in ".!?":
            good += words
    return good / total if total else 0.0


def count_tokens(text: str) -> int:
    """Return the number of words and punctuation marks in `text`: the embedded judge's unit of cost."""
    return len(re.findall(r"\w+|[^\w\s]", text))
