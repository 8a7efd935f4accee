"""Show a run while it trains: progress, trackers, and its share of the machine's peak."""
