"""What WildBench v2 asks a judge, and how its answers are read.

The templates are the official ones, loaded from a checkout. Texts go into them in one pass, so that a placeholder
inside a response stays text.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankbuffer_trl.judge.questions import fill
from rankbuffer_trl.judge.verdicts import VerdictError, shown

from .answers import read_object
from .wildbench_scores import EMPTY, REWARDS, shorten

MAX_WORDS = 1000
"""Words of each text in a pairwise prompt. A scoring prompt shows all of them."""
ROLES = {"user": "USER", "assistant": "ASSISTANT"}
RATINGS = (1, 10)


@dataclass(frozen=True)
class Conversation:
    """A row of WildBench v2.

    Args:
        session_id (`str`):
            Its name.
        turns (`tuple[tuple[str, str], ...]`):
            (role, text) from the first to the user's last, which is to be answered.
        checklist (`tuple[str, ...]`):
            What a judge is told to look for.
        tags (`tuple[str, ...]`):
            The primary tag, then the secondary ones.
        groups (`tuple[str, ...]`):
            The groups of tasks that it counts in.
    """

    session_id: str
    turns: tuple[tuple[str, str], ...]
    checklist: tuple[str, ...]
    tags: tuple[str, ...]
    groups: tuple[str, ...]

    @property
    def history(self) -> str:
        """All turns but the last."""
        return "".join(f"{ROLES[role]}: {text}\n\n" for role, text in self.turns[:-1] if role in ROLES)

    @property
    def query(self) -> str:
        """The last turn."""
        return self.turns[-1][1]

    @property
    def criteria(self) -> str:
        """The checklist as lines."""
        return "".join(f"- {item}\n" for item in self.checklist)


def scoring_prompt(template: str, conversation: Conversation, response: str) -> str:
    """Asks for a rating of `response`."""
    texts = {
        "{$history}": conversation.history,
        "{$user_query}": conversation.query,
        "{$model_output}": response,
        "{$checklist}": conversation.criteria,
    }
    return fill(template, texts)


def pairwise_prompt(template: str, conversation: Conversation, first: str, second: str) -> str:
    """Asks which of two responses is better, `first` being A. Both must be as [`display`] gives them."""
    texts = {
        "{$history}": shorten(conversation.history, MAX_WORDS),
        "{$user_query}": shorten(conversation.query, MAX_WORDS),
        "{$candidate_A}": first,
        "{$candidate_B}": second,
        "{$checklist}": conversation.criteria,
    }
    return fill(template, texts)


def display(response: str) -> str:
    """A response as a pairwise prompt shows it: cut after [`MAX_WORDS`], or a note that there is none."""
    short = shorten(response, MAX_WORDS)
    return short if short.strip() else EMPTY


def read_score(answer: str) -> dict[str, Any]:
    """A judge's answer whose `score` [`rating`] can read.

    Raises:
        [`VerdictError`]: if it is not such an answer. The official batch path drops it then.
    """
    verdict = read_object(answer, ["score"])
    rating(verdict)
    return verdict


def rating(verdict: Mapping[str, Any]) -> float:
    """The rating in a judge's answer: `"7"`, `7` or `7.5`. The official tables convert it with `float` alone.

    Raises:
        [`VerdictError`]: if it is no number, or outside 1..10.
    """
    score = verdict["score"]
    try:
        value = math.nan if isinstance(score, bool) else float(score)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not RATINGS[0] <= value <= RATINGS[1]:
        raise VerdictError(f"`score` must be a number from 1 to 10, not {shown(score)}")
    return value


def read_choice(answer: str) -> dict[str, Any]:
    """A judge's answer whose `choice` is one of the five verdicts.

    Raises:
        [`VerdictError`]: if it is not such an answer.
    """
    verdict = read_object(answer, ["choice"])
    if not isinstance(verdict["choice"], str) or verdict["choice"] not in REWARDS:
        raise VerdictError(f"`choice` must be one of {', '.join(REWARDS)}, not {shown(verdict['choice'])}")
    return verdict


def positions(seed: int, sessions: Sequence[str]) -> dict[str, bool]:
    """Whether the evaluated model is A, by session: one toss for each row of the benchmark, in its order."""
    generator = random.Random(seed)
    return {session: generator.random() < 0.5 for session in sessions}
