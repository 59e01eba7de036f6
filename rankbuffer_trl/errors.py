"""The base class of every error that a user can mend."""


class RankBufferError(Exception):
    """Something that the user can mend: a setting, a data set, a server, a file.

    Its text is one line that says what is wrong, where, and what to do. Commands print that line and exit with status
    1. They catch this class and `OSError` only, so that a bug in the code keeps its traceback.
    """


class SettingsError(RankBufferError, ValueError):
    """A setting has a value that cannot work, or two settings contradict each other."""
