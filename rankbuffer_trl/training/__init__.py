"""A run: the trainer, its settings, what it scores in a step, and its checkpoints."""

from .._debiasing import WORD_IS, Debiasing
from .._step import PENDING
from ..checkpointing._checkpoint import (
    check_not_uploaded,
    check_trusted,
    check_unchanged,
    hash_file,
    policy_differences,
    without_effect,
)
from ..checkpointing._distributed import MainProcessError, on_main_process
from ..monitoring._buffer_table import export_buffers
from ..monitoring._non_fatal import non_fatal
from ._batches import Batches
from ._config import RankBufferConfig
from ._first import require_questions, stand_in
from ._plan import RunPlan, check_budget, spent_before
from ._rollouts import RolloutError, SeparateRollouts
from ._scorer import GroupScorer, StepScore
from ._state import differences, identity
from ._trainer import NO_POLICY, RankBufferTrainer
