"""Strategies for groups of known quality, and for judges that fail now and then. `rankbuffer_trl.testing` has both."""

from hypothesis import strategies as st

QUALITIES = st.lists(st.none() | st.integers(0, 10), min_size=1, max_size=9)  # `None`: a rollout without an answer
CASES = st.tuples(st.integers(0, 999), st.sampled_from([0, 0.2, 0.5, 0.9]))  # seed, share that fails
RIGHT = (0, 0)
EIGHT = (5, 0, 9, 2, 10, 3, 8, 6)
