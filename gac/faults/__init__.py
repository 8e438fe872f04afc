"""What keeps a run from being lost: checkpoints, guards, replay of skipped steps."""
