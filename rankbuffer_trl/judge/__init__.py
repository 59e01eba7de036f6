"""The judge: questions in the paper's words, one seam that asks them, clients that answer, a ledger of its cost."""

from .errors import JudgeError, TransportError
from .judge import ChatClient, Judge
from .ledger import Call, Totals, Usage
from .questions import Question, VerdictError, insertion_question, ranking_question
from .rubric_judge import RubricJudge

__all__ = [
    "Call",
    "ChatClient",
    "Judge",
    "JudgeError",
    "Question",
    "RubricJudge",
    "Totals",
    "TransportError",
    "Usage",
    "VerdictError",
    "insertion_question",
    "ranking_question",
]
