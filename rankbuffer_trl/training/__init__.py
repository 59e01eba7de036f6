"""A run: the trainer, its settings, what it scores in a step, and its checkpoints."""

from ..checkpointing.checkpoint import check_not_uploaded, check_trusted, check_unchanged, hash_file
from ..checkpointing.distributed import MainProcessError, on_main_process
from ..debiasing import WORD_IS, Debiasing
from ..monitoring.buffer_table import export_buffers
from ..monitoring.non_fatal import non_fatal
from ..step import PENDING
from .batches import Batches
from .budget import check_budget, spent_before
from .config import RankBufferConfig
from .first import require_questions, stand_in
from .plan import RunPlan
from .rollouts import RolloutError, SeparateRollouts
from .scorer import GroupScorer, StepScore
from .state import differences, identity
from .trainer import NO_POLICY, RankBufferTrainer
