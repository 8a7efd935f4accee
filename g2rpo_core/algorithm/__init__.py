"""Says what a method is: what it samples, which reward belongs to what, and what it trains."""
