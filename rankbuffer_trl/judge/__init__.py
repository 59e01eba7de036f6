"""The judge: questions in the paper's words, one class that asks them, clients that answer, a ledger of the cost."""

from .errors import JudgeError, TransportError
from .judge import Askable, ChatClient, Judge
from .ledger import Call, Reply, Tally, Totals, Usage
from .probabilities import Reading
from .questions import (
    Question,
    duel_question,
    group_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from .rubric_judge import RubricJudge
from .verdicts import Verdict, VerdictError

__all__ = [
    "Askable",
    "Call",
    "ChatClient",
    "Judge",
    "JudgeError",
    "Question",
    "Reading",
    "Reply",
    "RubricJudge",
    "Tally",
    "Totals",
    "TransportError",
    "Usage",
    "Verdict",
    "VerdictError",
    "duel_question",
    "group_question",
    "insertion_question",
    "pairwise_question",
    "pointwise_question",
    "ranking_question",
    "selection_question",
]
