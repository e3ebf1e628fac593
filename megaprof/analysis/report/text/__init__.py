"""All English text of the report: sentences, made from data, for every output."""
