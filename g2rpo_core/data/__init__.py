"""Read, choose and encode prompts, and store their encodings."""

# Here, where importing them loads neither a library nor the hub's settings
FORMATS = (".txt", ".csv", ".jsonl", ".json", ".parquet")  # of prompt files, by their endings
LONGEST = 512  # tokens that T5 was trained with
