"""A file -> events -> calls: what one rank recorded."""
