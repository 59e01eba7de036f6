"""The judge: questions in the paper's words, one class that asks them, clients that answer, a ledger of the cost."""

from ._completion import TOO_LONG
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
from ._quoting import LONGEST_QUOTED, TOKENS_PER_MARK, defuse, show_response
from ._rubric_judge import RubricJudge, count_tokens, meets, parse_rubrics, rubric_score
from ._thoughts import THOUGHT_BEGINS, after_thought, answer_of, tag_fault
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
