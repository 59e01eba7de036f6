"""The probabilities behind a verdict: what else the judge would have said, and how likely that was.

A server that is asked for `logprobs` lists the likeliest tokens at each place of an answer, in OpenAI's form. The
reader walks along the tokens of the answer to the value of its key. Each listed token there leaves some alternatives
possible, such as `1` and `10` after the token `1`:

* One alternative: it gets the token's probability. A verdict of one token is exact, given the text before it.
* None: the probability is outside. So is that of all tokens that are not listed.
* Several, and the judge said this token: the walk goes on to the next token, whose probabilities are multiplied by
  that of this one. A number of two tokens is therefore exact where the judge said its first token.
* Several, and the judge said another token: nobody knows how they share it. It counts for none of them.

A server without log probabilities can answer several times in their place, see [`read_samples`].

A list has no reading. What comes after its first item depends on that item, and the probabilities are known along the
one list that was said.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..decoding import decode, parse_json
from ._ledger import Reply
from ._verdicts import Verdict, VerdictError

LISTED = 20
"""Likeliest tokens to ask for: the most that OpenAI's interface and a vLLM server without further settings give."""
SLACK = 1e-3  # by which probabilities may exceed 1; servers round them
LEAST_CHANCE = 1e-6  # of an alternative in log odds, because a token that is not listed has no logarithm
UNSEEN = 0.01
"""Share of a verdict that alternatives beyond the server's list may hold: a mean of 0 to 10 is off by 0.1 at most."""


class ProbabilityError(VerdictError):
    """Probabilities that cannot be read. The judge cannot mend that, so it is not asked again."""


class Reading(NamedTuple):
    """A verdict with the probabilities of its alternatives."""

    value: Any  # what the judge said
    chances: dict[Any, float]  # of each alternative, renormalised over all of them
    outside: float  # the probability on no alternative; 0 if the server reports them after its grammar
    shared: float  # that of beginnings which several alternatives have in common and the judge did not say

    @property
    def mean(self) -> float:
        """The mean of alternatives that are numbers."""
        return sum(number * chance for number, chance in self.chances.items())

    def log_odds(self, one: Any, other: Any) -> float:
        """Return by how much `one` is likelier than `other`, as the difference of their logarithms."""
        return math.log(max(self.chances[one], LEAST_CHANCE)) - math.log(max(self.chances[other], LEAST_CHANCE))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, in types that JSON has."""
        # A key of JSON is a text, and 1 is not "1".
        return self._asdict() | {"chances": {json.dumps(value): chance for value, chance in self.chances.items()}}

    @classmethod
    def of(cls, row: Any) -> "Reading":
        """Read what [`Reading.as_dict`] returned, or raise `ValueError`."""
        reading = decode(row, cls)
        return reading._replace(chances={parse_json(text): chance for text, chance in reading.chances.items()})


def lead(forth: Reading, back: Reading) -> float:
    """Return the log odds of the response that is `B` in one reading and `A` in the other, summed over both orders."""
    return forth.log_odds("B", "A") + back.log_odds("A", "B")


def alternatives(verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the one key of a verdict, and its alternatives as JSON spells them.

    Raises:
        `ValueError`: if the verdict is no choice of one value.
    """
    (key, schema), *further = verdict.properties.items()
    values = schema.get("enum")
    if further or values is None:
        raise ValueError(f"a verdict of lists has no alternatives with probabilities: {', '.join(verdict.properties)}")
    return key, {json.dumps(value): value for value in values}


def read_chances(verdict: Verdict, value: Any, logprobs: Any) -> Reading:
    """Read the probabilities of a verdict's alternatives.

    Args:
        value (`Any`):
            The value that was read from the answer.
        logprobs (`Any`):
            The log probabilities of the reply, in the server's form.

    Raises:
        [`ProbabilityError`]: if they are missing, no probabilities, of another answer, or too few.
    """
    key, spelled = alternatives(verdict)
    tokens = read_tokens(logprobs)
    text = "".join(token for token, _ in tokens)
    heads = [head.span() for head in re.finditer(rf'"{key}"\s*:', text)]
    base, start = heads[-1] if heads else (0, len(text))  # the last: a text before the object may name the key
    chances = dict.fromkeys(spelled.values(), 0.0)
    outside, shared, unseen, path, end, fewest = 0.0, 0.0, 0.0, 1.0, 0, LISTED
    decided = list(chances)
    for token, listed in tokens:
        before, end = end, end + len(token)
        if end <= start or not token:  # a token without text, such as the end of an answer, decides nothing
            continue
        likely = [(name, math.exp(checked_logprob(name, logprob))) for name, logprob in listed or [(token, 0.0)]]
        covered = sum(chance for _, chance in likely)
        if covered > 1 + SLACK:
            raise ProbabilityError(f"the probabilities at the token {token!r} add up to {covered:.4g}")
        unlisted = max(0.0, 1 - covered)
        outside += path * unlisted
        further, missing = 0.0, set(decided)
        for name, chance in likely:
            candidates = possible(text[base:before] + name, key, spelled) if name else []
            missing.difference_update(candidates)
            if len(candidates) == 1:
                chances[candidates[0]] += path * chance
            elif not candidates:
                outside += path * chance
            elif name == token:
                further += path * chance  # the judge said this token, so the next one decides
            else:
                shared += path * chance  # nobody knows how they share it
        if missing:  # each is at most as likely as the least token of the list; some servers fill it up with zeros
            least = min((chance for _, chance in likely if chance), default=1.0)
            unseen, fewest = unseen + path * min(unlisted, len(missing) * least), min(fewest, len(likely))
        path = further
        before_it, decided = decided, possible(text[base:end], key, spelled)
        if not listed and len(decided) < len(before_it):
            raise ProbabilityError(
                f"the judge's server lists no alternatives to {token!r}, as llama.cpp does after the first token of an"
                " answer if it drafts: start it without a draft model, or set judge_samples to 5"
            )
        if len(decided) < 2:
            break
    if decided != [value]:
        raise ProbabilityError(f"the tokens of the judge's logprobs do not spell its answer: {text[-80:]!r}")
    total = sum(chances.values())
    if not total:
        raise ProbabilityError("the judge's logprobs give no probability to any valid answer")
    if (share := unseen / (total + unseen)) > UNSEEN:
        raise ProbabilityError(
            f"the judge's server lists {fewest} tokens in its logprobs, too few: others may hold {share:.1%} of this"
            f" verdict. Use a server that gives `top_logprobs: {LISTED}`"
        )
    return Reading(value, {each: chance / total for each, chance in chances.items()}, outside, shared)


def read_samples(verdict: Verdict, samples: Sequence[Reply]) -> Reading:
    """Read the probabilities of a verdict's alternatives from answers that were sampled at temperature 1.

    The value is the most frequent one, the first of equals.

    Args:
        samples (`Sequence[Reply]`):
            One that was cut off counts as a vote only if [`Verdict.parse`] takes it.

    Raises:
        [`VerdictError`]: if no answer can be read, for the cause of the last one.
    """
    values, fault = [], VerdictError("there is no answer")
    for sample in samples:
        try:
            values.append(verdict.parse(sample.text, sample.cut_off))
        except VerdictError as error:
            fault = error
    if not values:
        raise fault
    counts, spelled = Counter(values), alternatives(verdict)[1].values()
    # One answer in all is spread over the alternatives (the prior of Perks), so that none has the probability 0.
    chances = {value: (counts[value] + 1 / len(spelled)) / (len(values) + 1) for value in spelled}
    return Reading(counts.most_common(1)[0][0], chances, 1 - len(values) / len(samples), 0.0)


def possible(text: str, key: str, spelled: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives that an answer can have which goes on after `text`."""
    head = re.search(rf'"{key}"\s*:\s*', text)
    rest = text[head.end() :] if head else ""
    return [
        value
        for json_text, value in spelled.items()
        if json_text.startswith(rest)
        or (rest.startswith(json_text) and re.match(r"\s*([,}]|$)", rest.removeprefix(json_text)))
    ]


def read_tokens(logprobs: Any) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return each token of a reply with its likeliest alternatives and their log probabilities, itself among them."""
    try:
        tokens = []
        for place in logprobs["content"]:
            listed = [(str(entry["token"]), float(entry["logprob"])) for entry in place["top_logprobs"]]
            token = str(place["token"])
            # A server may list the likeliest ones only, and have sampled another. Without a list, 0 may be no number.
            if token not in dict(listed) and (listed or place["logprob"] != 0):
                listed.append((token, float(place["logprob"])))
            tokens.append((token, listed))
    except (LookupError, TypeError, ValueError, OverflowError):
        tokens = []
    if not tokens:
        raise ProbabilityError(
            "the judge returns no logprobs, which this question needs. Use a server that gives `top_logprobs` for"
            " chats, such as vLLM or llama.cpp, or set judge_samples to 5"
        )
    return tokens


def checked_logprob(token: str, logprob: float) -> float:
    """Return the logarithm of a probability, at most 0, or raise [`ProbabilityError`] if it is none."""
    if math.isnan(logprob) or logprob > SLACK:
        raise ProbabilityError(f"the judge's server gives the log probability {logprob} for {token!r}, which is none")
    return min(logprob, 0.0)


def without_doubt(answer: str) -> dict[str, Any]:
    """Return the log probabilities of a judge that has no doubt."""
    places = [{"token": character, "logprob": 0.0} for character in answer]  # each character is a token
    return {"content": [{**place, "top_logprobs": [place]} for place in places]}
