"""What the durability benchmarks share: `recovery.py`, `classes.py` and `mixed.py` stand beside it."""
