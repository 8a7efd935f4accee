"""What tests and benchmarks compare with: the published training loops, and the published scorers."""
