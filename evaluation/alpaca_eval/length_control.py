"""The length-controlled win rate, fitted by the official `alpaca_eval` library.

The library is loaded on first use. It is an extra of its own, because its pins (setuptools below 81, scikit-learn
below 1.10) may not suit an environment that only trains.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from rankbuffer_trl.errors import SettingsError


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the root logger, then restore its level."""
    root = logging.getLogger()
    level = root.level  # the library sets it to INFO, also for its caller
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


def load_library() -> ModuleType:
    """Import the library, or raise [`SettingsError`] if it is not installed or another package breaks it."""
    try:
        with quiet():
            import alpaca_eval
            from alpaca_eval import metrics  # noqa: F401
    except ImportError as error:
        raise SettingsError(
            f"AlpacaEval's library cannot be used: {error}. Install the extra `evaluation` of this project, with"
            " alpaca_eval==0.6.6, setuptools<81 and scikit-learn<1.10"
        ) from error
    return alpaca_eval


def length_controlled(annotations, gamed: Path) -> dict[str, float]:
    """Return the official metrics of annotations, raw and length-controlled.

    Args:
        annotations (`pandas.DataFrame`):
            All rows in official order. The function adds a column `glm_preference`, in 0..1 per row.
    """
    import sklearn

    metrics = load_library().metrics
    with (
        quiet(),
        sklearn.config_context(),  # the fit changes the global configuration
        # It would download a version that is not pinned.
        patch("alpaca_eval.metrics.glm_winrate.hf_hub_download", lambda **kwargs: str(gamed)),
    ):
        return metrics.get_length_controlled_winrate(
            annotations, save_weights_dir=None, is_add_glm_preference_inplace=True
        )
