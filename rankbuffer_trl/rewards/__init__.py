"""Reward methods, one file each: those of the paper, and our own in `beyond`."""

from .._answers import Answer, check_format, read_answer
from ._gdpo import normalise
from ._method import (
    GroupScore,
    RewardMethod,
    find_method,
    load_method,
    method_names,
    score_by_order,
    score_by_rank,
    score_by_reward,
)
from ._pointwise import Pointwise
from ._prefetch import SilentJudge, first_questions
from ._presentation import shuffle
from ._rankbuffer import RankBuffer
from .beyond._listwise import Listwise
from .beyond._pairs_soft import PairsSoft
from .beyond._passes import RERANK, balanced, mean_ranks, pass_questions
from .beyond._rankbuffer_soft import RankBufferSoft
from .beyond._ratings_soft import RATING_MAX, RatingsSoft
