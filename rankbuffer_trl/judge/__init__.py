"""The judge: questions in the paper's words, one class that asks them, clients that answer, a ledger of the cost."""

from .endpoint import Endpoint, check_url
from .errors import JudgeError, TransportError, first_leaf, printable
from .judge import Askable, ChatClient, Judge, explain
from .ledger import KIND_NAMES, REFERENCE, Call, Reply, Tally, Totals, Usage
from .probabilities import (
    LEAST_CHANCE,
    ProbabilityError,
    Reading,
    checked_logprob,
    lead,
    read_chances,
    read_tokens,
    without_doubt,
)
from .questions import (
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
from .quoting import LONGEST_QUOTED, defuse, show_response
from .rubric_judge import RubricJudge, count_tokens, meets, parse_rubrics, rubric_score
from .thoughts import THOUGHT_BEGINS, after_thought, answer_of
from .verdicts import (
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
