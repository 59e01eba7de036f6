"""`python -m rankbuffer_trl.audit`, for a checkout that is not installed."""

from .command import main

main()
