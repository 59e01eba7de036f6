"""Exactness: a run that is killed at any moment goes on as if it had not been. Nothing here knows of rewards."""
