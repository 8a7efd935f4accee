"""Online RL: the iterations of a run, their records and checkpoints, and the views of a run in progress."""
