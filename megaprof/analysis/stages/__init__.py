"""Times of every stage: what its passes take, steps on one time axis, and whether the calls belong together."""
