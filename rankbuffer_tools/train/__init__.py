"""The program `rankbuffer-train`: recipe, plan and preflight, then the training."""
