"""The questions to a judge: their prompts, and the verdict that each expects.

The templates `coarse`, `fine` and `order_only` in `prompts/` are the paper's, word for word (appendices "Coarse- and
Fine-Ranking Prompts" and "Order-only configuration and judge prompt"). So is the instruction in `manage`. The paper
prints no prompt for the others.

The candidate comes last in a coarse prompt. All insertions of a group therefore share the text before it, and a server
with prefix caching computes that text once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..groups import Query, Rollout, Rubric
from ._ledger import Reply
from ._probabilities import LISTED, alternatives, read_chances, read_samples
from ._quoting import defuse, show_response
from ._verdicts import (
    Verdict,
    constrain,
    order_verdict,
    position_verdict,
    score_verdict,
    scores_verdict,
    selection_verdict,
    winner_verdict,
)

PROMPTS = Path(__file__).parent / "prompts"
COARSE, FINE, ORDER_ONLY, POINTWISE, PAIRWISE, DUEL, GROUP, MANAGE, GUARD_NOTE = (
    (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
    for name in "coarse fine order_only pointwise pairwise duel group manage guard_note".split()
)

FAULTS = "(A negative weight names a fault: a response that has it is worse.)"


@dataclass(frozen=True)
class Question:
    """One question to a judge.

    Args:
        kind (`str`):
            The name in the ledger: `insert` (coarse ranking), `order_only` (the same without the anchors' texts),
            `fine` (an interval), `bootstrap` (a whole group), `look` and `again` (a whole group, and a disputed block
            of it), `score`, `rubric`, `pair`, `duel`, `group` (a score for each rollout of a group) or `manage`.
        query_id (`str`):
            The query that the question is about.
        verdict (`Verdict`):
            The answer that is expected.
        template (`str`):
            The prompt with placeholders.
        texts (`Mapping[str, str]`):
            The text for each placeholder.
        responses (`Mapping[str, Sequence[tuple[str, str]]]`):
            For each placeholder that stands for responses: (heading, response) pairs. An empty heading is left out.
        soft (`bool`, *optional*, defaults to `False`):
            Ask for log probabilities too. The answer is then a [`Reading`] instead of the verdict alone.
    """

    kind: str
    query_id: str
    verdict: Verdict
    template: str
    texts: Mapping[str, str]
    responses: Mapping[str, Sequence[tuple[str, str]]]  # apart from `texts`, so that the guard can quote them
    soft: bool = False
    afresh = False  # a repeat names the fault of the answer before it

    def __post_init__(self):
        if self.soft:
            alternatives(self.verdict)  # raises for a verdict of lists: only a choice of one value can be read so

    def prompt(self, guard: bool = False) -> str:
        """Return the whole text for the judge. With `guard`, responses are quoted, so that none can imitate it."""
        # Always, else a row of a data set could end the judge's turn.
        texts = {name: defuse(text) for name, text in self.texts.items()}
        for name, pairs in self.responses.items():
            shown = [(f"[{heading}]\n" if heading else "") + show_response(text, guard) for heading, text in pairs]
            texts[name] = "\n\n".join(shown)
        prompt = fill(self.template, texts)
        return f"{GUARD_NOTE}\n\n{prompt}" if guard else prompt

    def chat(self, guard: bool = False) -> list[dict[str, str]]:
        """Return [`Question.prompt`] as the only message of a chat."""
        return [{"role": "user", "content": self.prompt(guard)}]

    def fields(self, decoding: str, free_tokens: int) -> dict[str, Any]:
        """Return the request fields that impose the verdict, see [`constrain`]."""
        logprob_fields = {"logprobs": True, "top_logprobs": LISTED} if self.soft else {}
        return constrain(self.verdict, decoding, free_tokens) | logprob_fields

    def read(self, answer: str, cut_off: bool = False) -> Any:
        """Return the verdict in `answer`, or raise [`VerdictError`]."""
        return self.verdict.parse(answer, cut_off)

    def read_reply(self, reply: Reply) -> Any:
        """Return the verdict in the text of a reply, as a [`Reading`] if `soft`, or raise [`VerdictError`]."""
        if self.soft and reply.samples:
            return read_samples(self.verdict, reply.samples)
        value = self.read(reply.text, reply.cut_off)
        return read_chances(self.verdict, value, reply.logprobs) if self.soft else value


def insertion_question(query: Query, anchors: Sequence[str], candidate: str, anchor_content: bool = True) -> Question:
    """Ask where `candidate` belongs among the anchors (coarse ranking). The verdict is an integer in 0..K.

    Args:
        anchors (`Sequence[str]`):
            The `K` anchor texts from worst to best.
        anchor_content (`bool`, *optional*, defaults to `True`):
            `False` shows only the anchors' identifiers (the order-only ablation).
    """
    K = len(anchors)
    texts = texts_of(query)
    responses = {"{CANDIDATE_RESPONSE}": [("", candidate)]}
    if anchor_content:
        kind, template = "insert", COARSE
        texts |= {"{K}": str(K), "{K-1}": str(K - 1)}
        responses["{ORDERED_ANCHOR_BLOCKS}"] = [(f"A{i}", anchor) for i, anchor in enumerate(anchors)]
    else:  # this template prints K and the list of identifiers without braces
        kind, template = "order_only", ORDER_ONLY
        names = "\n".join(f"[A{i}]" for i in range(K))
        texts |= {"K": str(K), "A(K-1)": f"A{K - 1}", "[A0]\n...\n[A(K-1)]": names}
    return Question(kind, query.id, position_verdict(K), template, texts, responses)


def ranking_question(
    query: Query, candidates: Sequence[Rollout], kind: str = "fine", by_slot: bool = False
) -> Question:
    """Ask for the order of the candidates (fine ranking). The verdict is their ids from worst to best.

    Args:
        candidates (`Sequence[Rollout]`):
            The rollouts, in the order in which the judge sees them.
        kind (`str`, *optional*, defaults to `"fine"`):
            The kind of question in the ledger.
        by_slot (`bool`, *optional*, defaults to `False`):
            Label the candidates by their position in the prompt: `[R0]` is shown first, and the verdict holds
            positions instead of ids. `False` is the paper's prompt.
    """
    # By slot, a change of the order also changes the labels. So a judge's preference for low labels cancels together
    # with its preference for early positions.
    ids = tuple(range(len(candidates))) if by_slot else tuple(candidate.id for candidate in candidates)
    texts = texts_of(query) | {"{CANDIDATE_IDS}": json.dumps(ids)}
    blocks = [(f"R{i}", candidate.text) for i, candidate in zip(ids, candidates, strict=True)]
    return Question(kind, query.id, order_verdict(ids), FINE, texts, {"{CANDIDATE_BLOCKS}": blocks})


def pointwise_question(query: Query, response: str, kind: str = "score", most: int = 10) -> Question:
    """Ask for a score of `response` alone. The verdict is an integer in 0..most."""
    texts = texts_of(query) | {"10": str(most)}  # the template prints 10
    return Question(kind, query.id, score_verdict(most), POINTWISE, texts, {"{RESPONSE}": [("", response)]})


def pairwise_question(query: Query, first: str, second: str, tie: bool = True) -> Question:
    """Ask which response is better. The verdict is `A` for `first`, `B` for `second` or, if `tie` is true, `tie`."""
    choices = ("A", "B", "tie") if tie else ("A", "B")
    texts = texts_of(query) | {
        "{OR_TIE}": ',\nor "tie" if neither is better' if tie else "",
        "{CHOICES}": " or ".join(json.dumps(choice) for choice in choices),
    }
    blocks = [("A", first), ("B", second)]
    return Question("pair", query.id, winner_verdict(choices), PAIRWISE, texts, {"{RESPONSE_BLOCKS}": blocks})


def duel_question(query: Query, first: str, second: str) -> Question:
    """Ask for the scores of two responses in comparison. The verdict is two integers in 0..10."""
    responses = {"{RESPONSE_BLOCKS}": [("A", first), ("B", second)]}
    return Question("duel", query.id, scores_verdict(), DUEL, texts_of(query), responses)


def group_question(query: Query, responses: Sequence[str]) -> Question:
    """Ask for a score of each response of a group in one prompt. The verdict is integers in 0..100, as shown."""
    texts = texts_of(query) | {"{N}": str(len(responses))}
    blocks = {"{RESPONSE_BLOCKS}": [(f"R{i}", response) for i, response in enumerate(responses)]}
    return Question("group", query.id, scores_verdict(len(responses), 100), GROUP, texts, blocks)


def selection_question(
    query: Query, ladder: Sequence[tuple[str, str]], look_ahead: Sequence[str], size: int
) -> Question:
    """Ask which responses of a ladder make the next buffer. The verdict is `size` of their ids.

    Args:
        ladder (`Sequence[tuple[str, str]]`):
            (id, text) from worst to best: `A0` and so on for anchors, `R0` for ranked rollouts.
        look_ahead (`Sequence[str]`):
            Unranked rollouts that the judge sees and may not choose.
    """
    ids = [name for name, _ in ladder]
    verdict = selection_verdict(
        tuple(name for name in ids if name[0] == "A"), tuple(name for name in ids if name[0] == "R"), size
    )
    texts = texts_of(query)
    responses = {"{LADDER_BLOCKS}": ladder, "{LOOK_AHEAD}": [(f"L{i}", text) for i, text in enumerate(look_ahead)]}
    return Question("manage", query.id, verdict, MANAGE, texts, responses)


def texts_of(query: Query) -> dict[str, str]:
    return {"{QUERY}": query.text, "{WEIGHTED_RUBRICS}": weighted_rubrics(query.rubrics)}


def weighted_rubrics(rubrics: Sequence[Rubric]) -> str:
    """Return one `1.[weight=5] text` line per rubric, as the paper's `WEIGHTED_RUBRICS`."""
    # A second line of a rubric could be read as another rubric, or as the end of all.
    each = ((rubric.weight, " ".join(rubric.text.split())) for rubric in rubrics)
    lines = [f"{i}.[weight={weight}] {text}" for i, (weight, text) in enumerate(each, start=1)]
    # The paper has no negative weights.
    return "\n".join(lines + [FAULTS] * any(rubric.weight < 0 for rubric in rubrics))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace all placeholders in one pass, so that placeholders and braces inside a value stay text."""
    names = sorted(values, key=len, reverse=True)  # the longest first, since "K" is a part of "A(K-1)"
    pattern = "|".join(rf"\b{name}\b" if name.isalnum() else re.escape(name) for name in names)
    return re.sub(pattern, lambda match: values[match.group()], template)
