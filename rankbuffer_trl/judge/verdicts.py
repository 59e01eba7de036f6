"""What a judge may answer: each verdict can be read strictly, and can be imposed on a server that decodes by rule.

A verdict is compact JSON such as `{"position": 3}`. Besides its strict reader it has the forms in which servers take
constraints: a regular expression or a grammar (vLLM), and a JSON schema (most others). Both leave no free white space,
in which a weak model would spend its tokens.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

GRAMMAR_LIMIT = 10
"""Candidates up to which an order is imposed exactly. A grammar with one rule per set of candidates left takes
xgrammar 0.02 s to compile for 8 and 0.15 s for 10 (150k tokens). As a regular expression, whose branches cannot share
their ends, 7 are 43 kB and 0.7 s, 8 are 346 kB and 42 s."""


SCORES = range(11)


class VerdictError(ValueError):
    """An answer that is not the verdict asked for. Its text names the fault, so that it can be put to the judge."""


class Verdict(Protocol):
    """What a question expects: one of the classes below."""

    def parse(self, answer: str) -> Any:
        """Read an answer strictly, or raise [`VerdictError`]."""

    @property
    def constraint(self) -> dict[str, str]:
        """vLLM's `structured_outputs`: a `regex` or a `grammar` of the compact answer."""

    @property
    def schema(self) -> dict:
        """JSON schema of the answer."""

    @property
    def longest(self) -> str:
        """A longest compact answer. Its UTF-8 length bounds the tokens of every valid one."""


@dataclass(frozen=True)
class Position:
    """`{"position": p}` with an integer insertion position `p` in 0..K."""

    K: int

    def parse(self, answer: str) -> int:
        """See [`Verdict`]."""
        position = read_field(answer, "position")
        if type(position) is not int or not 0 <= position <= self.K:
            raise VerdictError(f"`position` must be an integer from 0 through {self.K}, not {shown(position)}")
        return position

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]."""
        return {"regex": rf'\{{"position": {either(range(self.K + 1))}\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]."""
        return flat_object("position", {"type": "integer", "enum": list(range(self.K + 1))})

    @property
    def longest(self) -> str:
        """See [`Verdict`]."""
        return json.dumps({"position": self.K})


@dataclass(frozen=True)
class Order:
    """`{"order": [...]}`: a permutation of `ids`, worst to best."""

    ids: tuple[int, ...]

    def parse(self, answer: str) -> list[int]:
        """See [`Verdict`]."""
        order = read_field(answer, "order")
        if not isinstance(order, list) or any(type(i) is not int for i in order):
            raise VerdictError(f"`order` must be a list of integers, not {shown(order)}")
        if sorted(order) != sorted(self.ids):
            raise VerdictError(f"`order` must hold each of {list(self.ids)} exactly once, not {shown(order)}")
        return order

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]. Above `GRAMMAR_LIMIT` ids their number is imposed, not that each occurs once."""
        if len(self.ids) <= GRAMMAR_LIMIT:
            return {"grammar": permutation_grammar(self.ids)}
        one = either(self.ids)
        return {"regex": rf'\{{"order": \[{one}(, {one}){{{len(self.ids) - 1}}}\]\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]. A schema cannot impose that each id occurs once."""
        n = len(self.ids)
        items = {"type": "integer", "enum": list(self.ids)}
        return flat_object("order", {"type": "array", "items": items, "minItems": n, "maxItems": n})

    @property
    def longest(self) -> str:
        """See [`Verdict`]."""
        return json.dumps({"order": list(self.ids)})


@dataclass(frozen=True)
class Score:
    """`{"score": s}` with an integer `s` in 0..10."""

    def parse(self, answer: str) -> int:
        """See [`Verdict`]."""
        return check_score(read_field(answer, "score"))

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]."""
        return {"regex": rf'\{{"score": {either(SCORES)}\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]."""
        return flat_object("score", {"type": "integer", "enum": list(SCORES)})

    @property
    def longest(self) -> str:
        """See [`Verdict`]."""
        return json.dumps({"score": max(SCORES)})


@dataclass(frozen=True)
class Scores:
    """`{"scores": [a, b]}` with two integers in 0..10."""

    def parse(self, answer: str) -> tuple[int, int]:
        """See [`Verdict`]."""
        scores = read_field(answer, "scores")
        if not isinstance(scores, list) or len(scores) != 2:
            raise VerdictError(f"`scores` must be a list of two integers, not {shown(scores)}")
        return check_score(scores[0]), check_score(scores[1])

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]."""
        return {"regex": rf'\{{"scores": \[{either(SCORES)}, {either(SCORES)}\]\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]."""
        items = {"type": "integer", "enum": list(SCORES)}
        return flat_object("scores", {"type": "array", "items": items, "minItems": 2, "maxItems": 2})

    @property
    def longest(self) -> str:
        """See [`Verdict`]."""
        return json.dumps({"scores": [max(SCORES)] * 2})


@dataclass(frozen=True)
class Winner:
    """`{"winner": "A"}`: one of `choices`."""

    choices: tuple[str, ...]

    def parse(self, answer: str) -> str:
        """See [`Verdict`]."""
        winner = read_field(answer, "winner")
        if winner not in self.choices:
            raise VerdictError(f"`winner` must be one of {', '.join(self.choices)}, not {shown(winner)}")
        return winner

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]."""
        return {"regex": rf'\{{"winner": "{either(self.choices)}"\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]."""
        return flat_object("winner", {"type": "string", "enum": list(self.choices)})

    @property
    def longest(self) -> str:
        """See [`Verdict`]."""
        return json.dumps({"winner": max(self.choices, key=len)})


@dataclass(frozen=True)
class Selection:
    """`{"keep_anchor_ids": [...], "add_rollout_ids": [...]}`: `size` different ids in all, of those named."""

    anchors: tuple[str, ...]
    rollouts: tuple[str, ...]
    size: int

    def parse(self, answer: str) -> tuple[str, ...]:
        """See [`Verdict`]. The chosen ids, anchors first."""
        keep, add = (read_field(answer, key) for key in ("keep_anchor_ids", "add_rollout_ids"))
        for key, ids, allowed in (("keep_anchor_ids", keep, self.anchors), ("add_rollout_ids", add, self.rollouts)):
            if not isinstance(ids, list) or any(i not in allowed for i in ids):
                raise VerdictError(f"`{key}` must be a list of ids among {', '.join(allowed)}, not {shown(ids)}")
        chosen = (*keep, *add)
        if len(chosen) != self.size or len(set(chosen)) != self.size:
            raise VerdictError(f"the two lists must hold {self.size} different ids in all, not {shown(chosen)}")
        return chosen

    @property
    def constraint(self) -> dict[str, str]:
        """See [`Verdict`]. Bounds both lists; that there are `size` different ids in all is left to `parse`."""
        keep, add = (
            rf'\[("{either(ids)}"(, "{either(ids)}"){{0,{self.size - 1}}})?\]' for ids in (self.anchors, self.rollouts)
        )
        return {"regex": rf'\{{"keep_anchor_ids": {keep}, "add_rollout_ids": {add}\}}'}

    @property
    def schema(self) -> dict:
        """See [`Verdict`]. As loose as `constraint`."""
        lists = {
            key: {"type": "array", "items": {"type": "string", "enum": list(ids)}, "maxItems": self.size}
            for key, ids in (("keep_anchor_ids", self.anchors), ("add_rollout_ids", self.rollouts))
        }
        return {"type": "object", "properties": lists, "required": list(lists), "additionalProperties": False}

    @property
    def longest(self) -> str:
        """See [`Verdict`]. As long as `constraint` admits."""
        lists = ([max(ids, key=len)] * self.size for ids in (self.anchors, self.rollouts))
        return json.dumps(dict(zip(("keep_anchor_ids", "add_rollout_ids"), lists, strict=True)))


def check_score(score: Any) -> int:
    """`score`, if it is an integer in 0..10."""
    if type(score) is not int or score not in SCORES:
        raise VerdictError(f"a score must be an integer from 0 through {max(SCORES)}, not {shown(score)}")
    return score


def permutation_grammar(ids: Sequence[int]) -> str:
    """EBNF of `{"order": [...]}` over all permutations of `ids`: one rule per set of ids left, `2 ** n` in all."""
    rules: dict[str, str | None] = {}

    def rule(left: tuple[int, ...]) -> str:
        name = "left_" + "_".join(map(str, left))
        if name not in rules:
            rules[name] = None  # its place, before the rules it refers to
            rest = lambda i: rule(tuple(j for j in left if j != i))  # noqa: E731
            rules[name] = f'"{left[0]}"' if len(left) == 1 else " | ".join(f'"{i}, " {rest(i)}' for i in left)
        return name

    first = rule(tuple(ids))
    lines = [rf'root ::= "{{\"order\": [" {first} "]}}"', *(f"{name} ::= {body}" for name, body in rules.items())]
    return "\n".join(lines)


def either(values: Iterable[int | str]) -> str:
    """A regular expression for one of `values`."""
    return f"({'|'.join(map(str, values))})"


def flat_object(key: str, value: dict) -> dict:
    """JSON schema of an object that holds `key` alone."""
    return {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}


def shown(value: Any) -> str:
    """`value` as JSON, short enough for a message."""
    return json.dumps(value)[:80]


def read_field(answer: str, key: str) -> Any:
    """The value of `key` in the one JSON object of `answer`.

    Text around the object (a code fence, a sentence, a thinking block before it) is tolerated; a second object or a
    repeated key is not, since either leaves open which one is meant.
    """
    answer = answer.rpartition("</think>")[2]
    if "<think>" in answer:
        raise VerdictError("the answer ends inside its thinking block")
    objects = re.findall(r"\{[^{}]*\}", answer)
    if len(objects) != 1:
        raise VerdictError(f"the answer must hold exactly one flat JSON object, it holds {len(objects)}")
    try:
        pairs = json.loads(objects[0], object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise VerdictError(f"the answer is not valid JSON: {error}") from None
    values = [value for name, value in pairs if name == key]
    if len(values) != 1:
        raise VerdictError(f"the JSON object must have the key `{key}` exactly once")
    return values[0]
