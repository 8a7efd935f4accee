"""Pictures of any prompt by the base and by trained runs, and their scores: what `g2rpo generate`, `demo` and `export` share."""
