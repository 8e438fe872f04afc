"""Process groups, sharding (DDP, FSDP2) and collectives."""
