"""The training loop and what one step of it does."""
