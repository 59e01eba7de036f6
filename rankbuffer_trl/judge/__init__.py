"""The judge: questions in the paper's words, one class that asks them, clients that answer, a ledger of the cost."""

from .batch import AnswerLog, AnswerLogError, Answers, ask_many
from .chat import Chat
from .errors import JudgeError, TransportError
from .judge import Asked, ChatClient, Judge
from .ledger import Call, Reply, Tally, Totals, Usage
from .questions import (
    Question,
    batch_question,
    duel_question,
    group_question,
    insertion_question,
    pairwise_question,
    pointwise_question,
    ranking_question,
    selection_question,
)
from .rubric_judge import RubricJudge
from .verdicts import (
    Verdict,
    VerdictError,
    order_verdict,
    placement_verdict,
    position_verdict,
    score_verdict,
    scores_verdict,
    selection_verdict,
    winner_verdict,
)

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
    "Question",
    "Reply",
    "RubricJudge",
    "Tally",
    "Totals",
    "TransportError",
    "Usage",
    "Verdict",
    "VerdictError",
    "ask_many",
    "batch_question",
    "duel_question",
    "group_question",
    "insertion_question",
    "order_verdict",
    "pairwise_question",
    "placement_verdict",
    "pointwise_question",
    "position_verdict",
    "ranking_question",
    "score_verdict",
    "scores_verdict",
    "selection_question",
    "selection_verdict",
    "winner_verdict",
]
