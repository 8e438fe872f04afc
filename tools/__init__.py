"""Programs that write documents."""
