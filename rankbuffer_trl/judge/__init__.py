"""The judge: questions in the paper's words, one class that asks them, clients that answer, a ledger of the cost."""

from typing import TYPE_CHECKING, Any

from ._endpoint import Endpoint, check_url
from ._errors import JudgeError, TransportError, first_leaf, printable
from ._judge import Askable, ChatClient, Judge, explain
from ._ledger import KIND_NAMES, REFERENCE, Call, Reply, Tally, Totals, Usage
from ._probabilities import (
    LEAST_CHANCE,
    ProbabilityError,
    Reading,
    checked_logprob,
    lead,
    read_chances,
    read_tokens,
    without_doubt,
)
from ._questions import (
    Question,
    duel_question,
    fill,
    group_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from ._quoting import LONGEST_QUOTED, defuse, show_response
from ._rubric_judge import RubricJudge, count_tokens, meets, parse_rubrics, rubric_score
from ._thoughts import THOUGHT_BEGINS, after_thought, answer_of
from ._verdicts import (
    Verdict,
    VerdictError,
    constrain,
    either,
    max_tokens,
    one_of,
    position_verdict,
    read_object,
    score_verdict,
    scores_verdict,
    shorten_json,
)

if TYPE_CHECKING:
    from ._openai_client import OpenAIClient


def __getattr__(name: str) -> Any:
    """Import the client at its first use, so that a report need not wait for `openai` (0.5 s)."""
    if name != "OpenAIClient":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._openai_client import OpenAIClient

    return OpenAIClient
