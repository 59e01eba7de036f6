"""Say that the judge ranks thoughts: most rollouts begin with one, and no format check takes it off."""

import logging
from collections.abc import Sequence

from ..judge import tag_fault

logger = logging.getLogger(__name__)


class ThoughtMonitor:
    """The check of answers as the judge reads them, until a warning was given.

    A chat template does not tell: a policy may think without being asked to, or with tags of its own.

    Args:
        check (`str`):
            The setting `format_check`. All others than `none` say where the answer stands.
    """

    def __init__(self, check: str):
        self._pending = check == "none"

    def check_answers(self, answers: Sequence[str]) -> None:
        """Warn once if most of the answers begin with a thought or with another tag that closes later."""
        if self._pending and (fault := tag_fault(answers)):
            self._pending = False
            logger.warning(
                "rollouts: %s. If that is thinking, the judge ranks it, cut off or not: set format_check to think, or"
                " to a regular expression with a group (?P<answer>...)",
                fault,
            )
