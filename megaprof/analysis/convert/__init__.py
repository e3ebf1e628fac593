"""For other tools: one merged Perfetto trace, Parquet."""
