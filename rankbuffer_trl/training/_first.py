"""Questions before there are rollouts: those that a run asks first, about made-up groups."""

from collections.abc import Sequence
from functools import partial

from ..errors import SettingsError
from ..groups import Query, Rollout, RolloutGroup
from ..judge import Question
from ..rewards._method import RewardMethod
from ..rewards._prefetch import first_questions
from ._scorer import GroupScorer


def stand_in(query: Query, G: int, texts: Sequence[str] = ()) -> RolloutGroup:
    """Make a group to ask about before there are rollouts, of texts from worst to best, or else of made-up ones."""
    made_up = (*(rubric.text for rubric in query.rubrics), "I do not know.", "Let me explain step by step.")
    texts = (texts or query.responses or made_up)[::-1]
    return RolloutGroup(query, tuple(Rollout(i, texts[i % len(texts)]) for i in range(G)), step=0, epoch=0)


def require_questions(method: RewardMethod, questions: list[Question]) -> list[Question]:
    """Return the questions that a method asks at first. Refuse a method that asks none."""
    if not questions:
        raise SettingsError(
            f"the reward method {method.name!r} asks the judge nothing: name such a reward in reward_functions"
        )
    return questions


def first_question(scorer: GroupScorer, query: Query) -> None:
    """Ask each judge of a run one real question about `query`. No call enters the ledger.

    Raises:
        [`JudgeError`]: if there is no valid answer in time.
    """
    groups = (stand_in(query, G) for G in (2, 3, 4, 8, 16, 64))  # a method may ask nothing about a small group
    question = require_questions(
        scorer.method, next(filter(None, map(partial(first_questions, scorer.method), groups)), [])
    )[0]
    for judge in scorer.judges:
        asker = judge.for_method(on_spent=scorer.store.spend)  # its tokens count for the budget all the same
        scorer.run(asker.first_question(question, scorer.step_timeout))
