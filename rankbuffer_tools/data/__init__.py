"""The program `rankbuffer-data`, and what makes a training set: responses, rubrics, checks and the card."""
