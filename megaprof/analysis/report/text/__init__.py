"""All English of the report: sentences, made from data, for every output."""
