"""What goes to the Hub beside the policy: buffers, and a card that says how they came to be."""

from .card import write_card
from .push import BeforePush

__all__ = ["BeforePush", "write_card"]
