"""The accepted prompt files, by their endings, and the longest prompt."""

FORMATS = (".txt", ".csv", ".jsonl", ".json", ".parquet")
LONGEST = 512  # tokens that T5 was trained with
