"""Commands on a running job, which work through the files in its directory."""
