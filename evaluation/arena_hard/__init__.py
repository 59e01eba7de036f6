"""Arena-Hard v2.0."""
