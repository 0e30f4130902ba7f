"""Messages, one a sample, and tables of samples to columns; what cannot be trained on is told apart."""

from rowhaul.data.sources.messages.decoder import (
    Decoded,
    Message,
    MessageDecoder,
    Unreadable,
    Where,
    join_decoded,
)
from rowhaul.data.sources.messages.texts import Texts

__all__ = ["Decoded", "Message", "MessageDecoder", "Texts", "Unreadable", "Where", "join_decoded"]
