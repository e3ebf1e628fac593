"""Every number that decides what is named; other numbers of this room are facts of a format."""

from __future__ import annotations

#: A cause is named when it surely costs more than this part of the step.
LEAST = 0.02
#: Surely: the lower end of a two-sided interval of 90 %, in standard errors.
LEVEL = 1.645
#: A pipeline is filled and drained at no cost that matters with this many microbatches for each stage (GPipe, Huang et
#: al. 2019, section 4: "negligible when M >= 4 K").
FILLED = 4
#: Draws of steps and microbatches.
DRAWS = 24
#: Standard error of a price that no draw shows, as a part of it: what waits for what may differ. Of drawn pipelines
#: (`make bench-truth`) that nothing disturbs half of the prices are off by less than 0.2 %, one in ten by more than
#: 2.5 %; with this number intervals of 90 % hold 93 %.
REPLAYED = 0.015
