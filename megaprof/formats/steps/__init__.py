"""One step of a timeline as numbers: codes of its events, and facts about it."""
