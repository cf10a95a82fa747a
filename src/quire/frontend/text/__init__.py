"""From token ids to text, incrementally: bytes, UTF-8 hold-back, stop strings. Pure state machines."""
