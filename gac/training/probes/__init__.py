"""What some steps measure besides the gradient of their mixed loss: one probe per file."""
