"""The run configuration, the training loop and its optimizer step, export and replay."""
