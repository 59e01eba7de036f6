"""The judge: questions in the paper's words, one seam that asks them, clients that answer, a ledger of its cost."""

from .batch import AnswerLog, AnswerLogError, Answers, ask_many
from .chat import Chat
from .errors import JudgeError, TransportError
from .judge import Asked, ChatClient, Judge
from .ledger import Call, Reply, Tally, Totals, Usage
from .questions import (
    Question,
    duel_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from .rubric_judge import RubricJudge
from .verdicts import Order, Position, Score, Scores, Selection, Verdict, VerdictError, Winner

__all__ = [
    "AnswerLog",
    "AnswerLogError",
    "Answers",
    "Asked",
    "Call",
    "Chat",
    "ChatClient",
    "Judge",
    "JudgeError",
    "Order",
    "Position",
    "Question",
    "Reply",
    "RubricJudge",
    "Score",
    "Scores",
    "Selection",
    "Tally",
    "Totals",
    "TransportError",
    "Usage",
    "Verdict",
    "VerdictError",
    "Winner",
    "ask_many",
    "duel_question",
    "insertion_question",
    "pairwise_question",
    "pointwise_question",
    "ranking_question",
    "selection_question",
]
