"""Run `python -m rankbuffer_lab.audit` in a checkout that is not installed."""

from .command import main

main()
