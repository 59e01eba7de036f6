"""Reward methods, one file each: those of the paper, and our own in `beyond`."""

from .beyond.listwise import Listwise
from .beyond.pairs_soft import PairsSoft
from .beyond.passes import RERANK, balanced, mean_ranks, pass_questions
from .beyond.rankbuffer_soft import RankBufferSoft
from .beyond.ratings_soft import RATING_MAX, RatingsSoft
from .format import check_format, read_answer
from .gdpo import normalise
from .method import GroupScore, RewardMethod, find_method, load_method, method_names, score_by_reward
from .pointwise import Pointwise
from .prefetch import SilentJudge, first_questions
from .presentation import shuffle
from .rankbuffer import RankBuffer
