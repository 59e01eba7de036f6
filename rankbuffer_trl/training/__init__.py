"""A run: the trainer, its settings, what it scores in a step, and its checkpoints."""
