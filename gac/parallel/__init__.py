"""Single-process and distributed execution."""
