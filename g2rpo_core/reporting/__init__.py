"""Reports: reads scores and training records, compares runs with intervals, and renders pages, tables and charts."""
