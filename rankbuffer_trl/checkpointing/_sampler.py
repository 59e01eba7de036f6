"""The order of the data, which a resumed run keeps."""

from collections.abc import Callable

import torch
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """TRL's [`RepeatSampler`] with the permutation that belongs to the current epoch.

    Args:
        stock (`RepeatSampler`):
            The sampler whose settings are taken.
        epoch (`Callable[[], int]`):
            Returns the epoch that is about to begin or to be resumed, from 0.
    """

    def __init__(self, stock: RepeatSampler, epoch: Callable[[], int]):
        super().__init__(
            stock.data_source, stock.mini_repeat_count, stock.batch_size, stock.repeat_count, stock.shuffle, stock.seed
        )
        self.epoch = epoch

    def __iter__(self):
        # The stock sampler draws one permutation per epoch, and begins with the first again after a resume: a run
        # resumed in epoch 2 would visit queries twice or never. So all earlier permutations are drawn anew.
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()
