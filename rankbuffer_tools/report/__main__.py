"""Run `python -m rankbuffer_tools.report` in a checkout that is not installed."""

from .command import main

main()
