"""The verdicts of a judge: each is read strictly, and can be imposed on a server that constrains decoding.

A verdict is compact JSON such as `{"position": 3}`. A server takes its form as a regular expression or a grammar
(vLLM), or as a JSON schema (most others). The regular expressions and grammars leave no free white space, in which a
weak model would spend its tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import Any

from ._thoughts import THOUGHT_BEGINS, after_thought

DECODINGS = ("regex", "json_schema", "none")
GRAMMAR_LIMIT = 10
"""Candidates up to which an order is imposed exactly. A grammar with one rule per set of candidates left takes
xgrammar 0.02 s to compile for 8 and 0.15 s for 10 (150k tokens). As a regular expression, whose branches cannot share
their ends, 7 are 43 kB and 0.7 s, 8 are 346 kB and 42 s."""

OBJECT = re.compile(r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', re.DOTALL)  # a flat one; a string in it may hold braces
LONGEST_ANSWER = 100_000
"""Characters in which an object is looked for. 1,024 tokens have far fewer."""
FENCE = re.compile(r"\s*(?:```\w*\s*)?")  # what may stand before the verdict of an answer that was cut off


class VerdictError(ValueError):
    """An answer that is not the verdict asked for. Its text names the fault, so that it can be put to the judge."""


@dataclass(frozen=True)
class Verdict:
    """The answer that a question expects.

    Args:
        longest_value (`Mapping[str, Any]`):
            A longest answer that `constraint` admits, as a JSON object.
        imposed (`Mapping[str, str]` or `Callable[[], Mapping[str, str]]`):
            vLLM's `structured_outputs`: a `regex` or a `grammar` of the compact answer. Verdicts are equal by the
            other two, which must tell it.
        properties (`Mapping[str, dict]`):
            The JSON schema of each key's value.
        check (`Callable[..., Any]`):
            Takes the values of the keys and returns the verdict, or raises [`VerdictError`].
    """

    longest_value: Mapping[str, Any]
    imposed: Mapping[str, str] | Callable[[], Mapping[str, str]] = field(compare=False, repr=False)
    properties: Mapping[str, dict]
    check: Callable[..., Any] = field(compare=False, repr=False)

    def parse(self, answer: str, cut_off: bool = False) -> Any:
        """Read an answer strictly, or raise [`VerdictError`]. `cut_off` says that it ended at its token limit."""
        return self.check(*[read_field(answer, key, cut_off) for key in self.properties])

    @property
    def constraint(self) -> Mapping[str, str]:
        """What a server imposes: a `regex` or a `grammar`."""
        # A grammar takes time, and most servers take none.
        return self.imposed() if callable(self.imposed) else self.imposed

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the answer."""
        keys = list(self.properties)
        return {"type": "object", "properties": self.properties, "required": keys, "additionalProperties": False}

    @property
    def longest(self) -> str:
        """A longest compact answer."""
        return json.dumps(self.longest_value)


@lru_cache(maxsize=256)  # a step asks hundreds of these questions, about buffers of few sizes
def position_verdict(K: int) -> Verdict:
    """Expect `{"position": p}` with an integer insertion position `p` in 0..K."""

    def check(position: Any) -> int:
        if type(position) is not int or not 0 <= position <= K:  # `True` is no position
            raise VerdictError(f"`position` must be an integer from 0 through {K}, not {shorten_json(position)}")
        return position

    positions = range(K + 1)
    regex = rf'\{{"position": {either(positions)}\}}'
    return Verdict({"position": K}, {"regex": regex}, {"position": one_of("integer", positions)}, check)


def order_verdict(ids: Sequence[int]) -> Verdict:
    """Expect `{"order": [...]}`: a permutation of `ids`, worst to best."""
    n = len(ids)

    def check(order: Any) -> list[int]:
        if not isinstance(order, list) or any(type(i) is not int for i in order):
            raise VerdictError(f"`order` must be a list of integers, not {shorten_json(order)}")
        if sorted(order) != sorted(ids):  # above `GRAMMAR_LIMIT`, and in the schema, only their number is imposed
            raise VerdictError(f"`order` must hold each of {list(ids)} exactly once, not {shorten_json(order)}")
        return order

    def imposed() -> dict[str, str]:
        if n <= GRAMMAR_LIMIT:
            return {"grammar": permutation_grammar(tuple(ids))}
        return {"regex": rf'\{{"order": \[{either(ids)}(, {either(ids)}){{{n - 1}}}\]\}}'}

    return Verdict({"order": list(ids)}, imposed, {"order": list_of(n, one_of("integer", ids))}, check)


def score_verdict(most: int = 10) -> Verdict:
    """Expect `{"score": s}` with an integer `s` in 0..most."""
    allowed = range(most + 1)

    def check(score: Any) -> int:
        return check_score(score, allowed)

    regex = rf'\{{"score": {either(allowed)}\}}'
    return Verdict({"score": most}, {"regex": regex}, {"score": one_of("integer", allowed)}, check)


def scores_verdict(n: int = 2, most: int = 10) -> Verdict:
    """Expect `{"scores": [a, b]}` with `n` integers in 0..most."""
    allowed = range(most + 1)

    def check(scores: Any) -> tuple[int, ...]:
        if not isinstance(scores, list) or len(scores) != n:
            raise VerdictError(f"`scores` must be a list of {n} integers, not {shorten_json(scores)}")
        return tuple(check_score(score, allowed) for score in scores)

    regex = rf'\{{"scores": \[{either(allowed)}{f", {either(allowed)}" * (n - 1)}\]\}}'
    listed = list_of(n, one_of("integer", allowed))
    return Verdict({"scores": [most] * n}, {"regex": regex}, {"scores": listed}, check)


def winner_verdict(choices: Sequence[str]) -> Verdict:
    """Expect `{"winner": "A"}` with one of `choices`."""

    def check(winner: Any) -> str:
        if winner not in choices:
            raise VerdictError(f"`winner` must be one of {', '.join(choices)}, not {shorten_json(winner)}")
        return winner

    regex = rf'\{{"winner": "{either(choices)}"\}}'
    return Verdict({"winner": max(choices, key=len)}, {"regex": regex}, {"winner": one_of("string", choices)}, check)


def selection_verdict(anchors: Sequence[str], rollouts: Sequence[str], size: int) -> Verdict:
    """Expect `{"keep_anchor_ids": [...], "add_rollout_ids": [...]}`: `size` different ids in all, of those named.

    The verdict is the chosen ids, anchors first.
    """
    allowed = {"keep_anchor_ids": anchors, "add_rollout_ids": rollouts}

    def check(*lists: Any) -> tuple[str, ...]:
        for (key, valid), ids in zip(allowed.items(), lists, strict=True):
            if not isinstance(ids, list) or any(i not in valid for i in ids):
                raise VerdictError(f"`{key}` must be a list of ids among {', '.join(valid)}, not {shorten_json(ids)}")
        chosen = tuple(i for ids in lists for i in ids)
        if len(chosen) != size or len(set(chosen)) != size:  # `constraint` and `schema` bound each list alone
            raise VerdictError(f"the two lists must hold {size} different ids in all, not {shorten_json(chosen)}")
        return chosen

    keep, add = (rf'\[("{either(ids)}"(, "{either(ids)}"){{0,{size - 1}}})?\]' for ids in allowed.values())
    return Verdict(
        {key: [max(ids, key=len)] * size for key, ids in allowed.items()},
        {"regex": rf'\{{"keep_anchor_ids": {keep}, "add_rollout_ids": {add}\}}'},
        {key: {"type": "array", "items": one_of("string", ids), "maxItems": size} for key, ids in allowed.items()},
        check,
    )


def constrain(verdict: Verdict, decoding: str, free_tokens: int) -> dict[str, Any]:
    """Return the request fields that impose `verdict`, with a token limit that never cuts a valid answer off.

    Args:
        decoding (`str`):
            One of `DECODINGS`.
        free_tokens (`int`):
            Tokens for text in addition to the verdict, at least 0. Under `regex` there is none.
    """
    limit = {"max_tokens": max_tokens(verdict, decoding, free_tokens)}
    if decoding == "regex":
        return limit | {"structured_outputs": dict(verdict.constraint)}
    if decoding == "json_schema":
        schema = {"name": "verdict", "strict": True, "schema": verdict.schema}
        return limit | {"response_format": {"type": "json_schema", "json_schema": schema}}
    return limit


def max_tokens(verdict: Verdict, decoding: str, free_tokens: int) -> int:
    """Return the most tokens that an answer may have. The arguments are those of [`constrain`]."""
    length = len(verdict.longest.encode()) + 1  # a token is at least one byte of text, and one token ends the answer
    return length if decoding == "regex" else length + free_tokens


def check_score(score: Any, allowed: range) -> int:
    """Return `score` if it is an integer in `allowed`, or raise [`VerdictError`]."""
    if type(score) is not int or score not in allowed:  # not `isinstance`, since `True` is an int
        raise VerdictError(f"a score must be an integer from 0 through {max(allowed)}, not {shorten_json(score)}")
    return score


@lru_cache(maxsize=256)  # a group of eight has 255 sets of ids
def permutation_grammar(ids: tuple[int, ...]) -> str:
    """Return an EBNF of `{"order": [...]}` over all permutations of `ids`: one rule per set of ids left."""
    lines = [rf'root ::= "{{\"order\": [" {rule_of(range(len(ids)))} "]}}"']
    for n in range(len(ids), 1, -1):
        for remaining in combinations(range(len(ids)), n):
            rest = (f'"{ids[place]}, " {rule_of(each for each in remaining if each != place)}' for place in remaining)
            lines.append(f"{rule_of(remaining)} ::= {' | '.join(rest)}")
    return "\n".join(lines + [f'{rule_of([place])} ::= "{i}"' for place, i in enumerate(ids)])


def rule_of(remaining: Iterable[int]) -> str:
    """Return the name of the rule of the ids at the places `remaining`."""
    return f"r{sum(1 << place for place in remaining)}"  # a long name would double the grammar


def either(values: Iterable[int | str]) -> str:
    """Return a regular expression for one of `values`."""
    return f"({'|'.join(map(str, values))})"


def one_of(kind: str, values: Iterable[int | str]) -> dict[str, Any]:
    """Return the JSON schema of one of `values`, all of the JSON type `kind`."""
    return {"type": kind, "enum": list(values)}


def list_of(n: int, items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": n, "maxItems": n}


def shorten_json(value: Any) -> str:
    """Return `value` as JSON, short enough for a message."""
    return json.dumps(value)[:80]


def check_place(answer: str, start: int | None, cut_off: bool) -> None:
    """Refuse an object that an answer has in a thought.

    Args:
        answer (`str`):
            The answer, without the thoughts that are closed.
        start (`int`, *optional*):
            Where its object begins, `None` if there is none.
        cut_off (`bool`):
            Whether the answer was cut off, and no thought in it was closed.
    """
    if THOUGHT_BEGINS.search(answer, 0, len(answer) if start is None else start):
        raise VerdictError("the answer ends inside its thinking block")
    # Chat templates such as Qwen3-Thinking's write `<think>` into the prompt: a thought that was cut off has no tag.
    # It often restates the task, whose example of a verdict is a valid one.
    if cut_off and (start is None or not FENCE.fullmatch(answer, 0, start)):
        raise VerdictError("the answer was cut off before its verdict")


def read_object(answer: str, keys: Sequence[str], cut_off: bool = False) -> tuple[dict[str, Any], bool]:
    """Return the one JSON object of `answer` with `keys`, and whether there is text around it.

    Args:
        cut_off (`bool`, *optional*, defaults to `False`):
            Whether the answer ended before its end. Its object then counts only at its beginning or behind a thought.

    Raises:
        [`VerdictError`]: if there is no such object, or several.
    """
    value: Any = None
    fault = ""
    try:
        value = json.loads(answer)  # first, since a string in it may hold tags of a thought
    except (ValueError, RecursionError) as error:
        fault = f" (not valid JSON: {error})"
    fits = [(value, False)] if has_keys(value, keys) else []
    if not isinstance(value, dict):
        answer, closed = after_thought(answer)
        if len(answer) > LONGEST_ANSWER:
            raise VerdictError(f"the answer has {len(answer):,} characters; {LONGEST_ANSWER:,} are allowed")
        parsed = [entry for entry in objects(answer) if has_keys(entry[0], keys)]
        check_place(answer, parsed[0][1] if parsed else None, cut_off and not closed)
        fits = [(value, answer.strip() != answer[start:end]) for value, start, end in parsed]
    if len(fits) != 1:
        named = " and ".join(f"`{key}`" for key in keys)
        raise VerdictError(
            f"the answer must hold one whole JSON object with {named}, it holds {len(fits)}{fault * (not fits)}"
        )
    return fits[0]


def has_keys(value: Any, keys: Sequence[str]) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def objects(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the outermost JSON objects in a text, from left to right, each with its start and its end."""
    decoder = json.JSONDecoder()
    end = 0
    for start in re.finditer(r'\{\s*"', text):
        if start.start() < end:  # inside the one before
            continue
        try:
            value, end = decoder.raw_decode(text, start.start())
        except RecursionError:  # every object that begins inside this one is nested too deep as well
            return
        except ValueError:
            continue
        yield value, start.start(), end


def read_field(answer: str, key: str, cut_off: bool = False) -> Any:
    """Return the value of `key` in the one JSON object of `answer`, or raise [`VerdictError`]."""
    answer, closed = after_thought(answer)
    objects = list(OBJECT.finditer(answer))
    check_place(answer, objects[0].start() if objects else None, cut_off and not closed)
    if len(objects) != 1:
        raise VerdictError(f"the answer must hold exactly one flat JSON object, it holds {len(objects)}")
    (object_match,) = objects
    if "{" in answer[: object_match.start()]:
        raise VerdictError("the answer must be one flat JSON object, not an object inside another one")
    try:
        pairs = json.loads(object_match.group(), object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise VerdictError(f"the answer is not valid JSON: {error}") from None
    values = [value for name, value in pairs if name == key]
    if len(values) != 1:  # a repeated key leaves open what is meant, as a second object does
        raise VerdictError(f"the JSON object must have the key `{key}` exactly once")
    return values[0]
