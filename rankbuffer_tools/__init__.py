"""The programs: what one runs before, beside and after a training. Training imports nothing of it."""
