"""What is asked of a judge: the paper's prompts, filled in, each with the strict reading of its answer.

The templates in `prompts/` are the paper's, word for word (appendices "Coarse- and Fine-Ranking Prompts" and
"Order-only configuration and judge prompt").
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..groups import Query, Rollout, Rubric

PROMPTS = Path(__file__).parent / "prompts"
COARSE, FINE, ORDER_ONLY = (
    (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n") for name in ("coarse", "fine", "order_only")
)


class VerdictError(ValueError):
    """An answer that is not the verdict asked for. Its text names the fault, so that it can be put to the judge."""


@dataclass(frozen=True)
class Question:
    """One judgment to ask for.

    Args:
        kind (`str`):
            `insert` (coarse ranking) or `rank` (listwise: fine ranking and bootstrap).
        query_id (`str`):
            The query it belongs to.
        prompt (`str`):
            The whole text for the judge.
        parse (`Callable[[str], Any]`):
            Reads the answer strictly: returns the verdict or raises [`VerdictError`].
    """

    kind: str
    query_id: str
    prompt: str
    parse: Callable[[str], Any]


def insertion_question(query: Query, anchors: Sequence[str], candidate: str, anchor_content: bool = True) -> Question:
    """Coarse ranking: where does `candidate` belong among the anchors? The verdict is an integer in 0..K.

    Args:
        query (`Query`):
            The query with its rubrics.
        anchors (`Sequence[str]`):
            The `K` anchor texts from worst to best.
        candidate (`str`):
            The rollout's answer.
        anchor_content (`bool`, *optional*, defaults to `True`):
            `False` shows the anchors' identifiers alone (the order-only ablation).
    """
    K = len(anchors)
    shared = {
        "{QUERY}": query.text,
        "{WEIGHTED_RUBRICS}": weighted_rubrics(query.rubrics),
        "{CANDIDATE_RESPONSE}": candidate,
    }
    if anchor_content:
        blocks = "\n\n".join(f"[A{i}]\n{anchor}" for i, anchor in enumerate(anchors))
        prompt = fill(COARSE, shared | {"{K}": str(K), "{K-1}": str(K - 1), "{ORDERED_ANCHOR_BLOCKS}": blocks})
    else:  # this template prints K and the list of identifiers without braces
        names = "\n".join(f"[A{i}]" for i in range(K))
        prompt = fill(ORDER_ONLY, shared | {"K": str(K), "A(K-1)": f"A{K - 1}", "[A0]\n...\n[A(K-1)]": names})
    return Question("insert", query.id, prompt, partial(parse_position, K=K))


def ranking_question(query: Query, candidates: Sequence[Rollout]) -> Question:
    """Listwise ranking: the verdict is the candidates' ids from worst to best.

    Used for an interval with two rollouts or more, and for the whole group that bootstraps a buffer. Candidates stand
    in the order given; rollouts of a group are exchangeable, so their ids favour none.
    """
    ids = [candidate.id for candidate in candidates]
    prompt = fill(
        FINE,
        {
            "{QUERY}": query.text,
            "{WEIGHTED_RUBRICS}": weighted_rubrics(query.rubrics),
            "{CANDIDATE_BLOCKS}": "\n\n".join(f"[R{candidate.id}]\n{candidate.text}" for candidate in candidates),
            "{CANDIDATE_IDS}": json.dumps(ids),
        },
    )
    return Question("rank", query.id, prompt, partial(parse_order, ids=ids))


def weighted_rubrics(rubrics: Sequence[Rubric]) -> str:
    """One `1.[weight=5] text` line per rubric, as the paper's `WEIGHTED_RUBRICS`."""
    return "\n".join(f"{i}.[weight={rubric.weight}] {rubric.text}" for i, rubric in enumerate(rubrics, start=1))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder of `values` in one pass, so that placeholders and braces inside a value stay text."""
    names = sorted(values, key=len, reverse=True)
    pattern = "|".join(rf"\b{name}\b" if name.isalnum() else re.escape(name) for name in names)
    return re.sub(pattern, lambda match: values[match.group()], template)


def parse_position(answer: str, K: int) -> int:
    """Read `{"position": p}` with an integer `p` in 0..K, or raise [`VerdictError`]."""
    position = read_field(answer, "position")
    if type(position) is not int or not 0 <= position <= K:
        raise VerdictError(f"`position` must be an integer from 0 through {K}, not {json.dumps(position)[:80]}")
    return position


def parse_order(answer: str, ids: Sequence[int]) -> list[int]:
    """Read `{"order": [...]}` that holds each of `ids` exactly once, or raise [`VerdictError`]."""
    order = read_field(answer, "order")
    if not isinstance(order, list) or any(type(i) is not int for i in order):
        raise VerdictError(f"`order` must be a list of integers, not {json.dumps(order)[:80]}")
    if sorted(order) != sorted(ids):
        raise VerdictError(f"`order` must hold each of {list(ids)} exactly once, not {json.dumps(order)[:80]}")
    return order


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
