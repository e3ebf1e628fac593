"""The numbers that decide what is named. All other numbers in this room are facts of a format."""

from __future__ import annotations

#: A cause is named if it certainly costs more than this fraction of the step: the lower end of its interval
#: (`samples.Interval`) is above it.
LEAST = 0.02
#: With this many microbatches per stage, filling and draining a pipeline costs nothing that matters (GPipe, Huang et
#: al. 2019, section 4: "negligible when M >= 4 K").
FILLED = 4
#: How many times steps and microbatches are drawn to see how much an estimate varies.
DRAWS = 24
#: Standard error that no draw shows, as a fraction of a price: the replay may let a pass wait for something else than
#: the job did. In undisturbed random pipelines (`make bench-truth`), half of the prices are off by less than 0.2 % and
#: one in ten by more than 2.5 %. With this number, 93 % of the true prices are inside their 90 % intervals.
REPLAYED = 0.015
