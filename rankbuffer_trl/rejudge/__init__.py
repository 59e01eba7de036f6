"""Judge the stored rollouts of a run again: what would another judge have taught, and does the last epoch win?"""
