"""Run `python -m rankbuffer_tools.audit` in a checkout that is not installed."""

from .command import main

main()
