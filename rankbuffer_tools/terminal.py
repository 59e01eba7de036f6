"""What each command does with the terminal before it begins."""

import sys
from io import TextIOWrapper

from datasets import disable_progress_bars


def prepare_terminal() -> None:
    """Show no bars where nobody looks, and write a letter that the locale has not as its number."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    if isinstance(sys.stdout, TextIOWrapper):  # a letter of an answer must not end what is paid for
        sys.stdout.reconfigure(errors="backslashreplace")
