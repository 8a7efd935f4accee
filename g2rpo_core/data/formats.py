"""What prompts may be: the files that are read, by their endings, and how long a text."""

FORMATS = (".txt", ".csv", ".jsonl", ".json", ".parquet")
LONGEST = 512  # tokens that FLUX's text encoder was trained with
