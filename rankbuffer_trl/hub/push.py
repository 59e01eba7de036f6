"""What goes to the Hub beside the policy. Each upload of a run's folder is preceded by its buffers and its card."""

from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class BeforePush(TrainerCallback):
    """Runs `prepare` on the main process before an upload begins.

    A checkpoint's own files are written by `save_model`. The run's folder, which becomes the repository's top, gets
    its share here: the trainer copies the policy there and nothing else.

    Args:
        prepare (`Callable[[], None]`):
            Writes the files.
    """

    def __init__(self, prepare: Callable[[], None]):
        self.prepare = prepare

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Called on every process by `push_to_hub`, on the main one alone while training."""
        if state.is_world_process_zero:
            self.prepare()
