"""Commands on a running job, by the files in its save directory."""
