"""Process groups, sharding (DDP, FSDP2) and collectives.

This package may import `config`.
"""
