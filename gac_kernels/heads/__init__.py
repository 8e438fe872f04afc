"""The fused head and loss inside other trainers: one module per trainer, which imports only it."""
