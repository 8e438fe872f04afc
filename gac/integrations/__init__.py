"""GAC inside other trainers: one module per trainer, and the `Mixer` that they share."""
