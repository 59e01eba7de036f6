"""What can go wrong with a judge."""


class JudgeError(RuntimeError):
    """The judge cannot be worked with: unreachable, misconfigured, or failing too often."""


class TransportError(JudgeError):
    """One request got no usable answer, its transport retries included. `attempts` says how many were sent."""

    def __init__(self, message: str, attempts: int = 1):
        super().__init__(message)
        self.attempts = attempts
