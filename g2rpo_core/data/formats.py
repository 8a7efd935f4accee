"""The prompt files that are read, by their endings."""

FORMATS = (".txt", ".csv", ".jsonl", ".json", ".parquet")
