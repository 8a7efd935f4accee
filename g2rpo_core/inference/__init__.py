"""Pictures of any prompt with the base and with trained runs, and their scores, for `g2rpo generate`, `demo` and `export`."""
