"""The order of the data, which a resumed run keeps."""

from collections.abc import Callable

import torch
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """TRL's [`RepeatSampler`] with the permutation that belongs to the current epoch.

    The stock sampler draws one permutation per epoch and starts with the first again when a run is resumed. A run that
    is resumed in epoch 2 would see the order of epoch 0, and visit queries twice or never. This sampler draws all
    permutations up to the current epoch each time. An uninterrupted run therefore has the stock order.

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
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()
