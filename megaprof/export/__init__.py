"""``megaprof export``: timelines as Parquet files."""
