"""The torch.distributed backend named "unisono" (docs/torch.md): process_group.py is its class."""
