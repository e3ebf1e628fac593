"""The report as data and for people: on a terminal, as HTML, and as a diff."""
