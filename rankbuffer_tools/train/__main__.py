"""Run `python -m rankbuffer_tools.train` in a checkout that is not installed."""

from .command import main

main()
