"""Online RL: iterations of a run, their records and checkpoints, and views of a run in progress."""
