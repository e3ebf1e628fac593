"""One diagnosis from one table of passes: every cause is a term of a model of the step, priced by a replay without it."""
