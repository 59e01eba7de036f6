"""Run `python -m rankbuffer_tools.compare` in a checkout that is not installed."""

from .command import main

main()
