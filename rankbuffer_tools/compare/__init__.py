"""Which of two policies does the judge prefer? Two epochs of a run by their stored answers, or two models."""
