"""Run `python -m rankbuffer_tools.data` in a checkout that is not installed."""

from .command import main

main()
