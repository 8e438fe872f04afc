"""Process groups, sharding (DDP, FSDP2) and collectives.

It may import `config`.
"""
