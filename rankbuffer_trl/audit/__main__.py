"""Run `python -m rankbuffer_trl.audit` in a checkout that is not installed."""

from .command import main

main()
