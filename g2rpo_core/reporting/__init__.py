"""Reports: read scores and training records, compare runs with intervals, render pages."""
