"""The report as data, and for people: terminal, HTML, diff."""
