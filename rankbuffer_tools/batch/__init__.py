"""Jobs over many questions, which survive a kill: for data, evaluation, audit and comparison."""
