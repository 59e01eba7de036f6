"""Experiments that were made once: each folder has its question, its command, its stored result and its own tests."""
