"""The numbers that decide what is named, how it is called, and which change is advised. Three are used below this
room, too. All other numbers here and in `what_if` are facts of a format or a method, or limit the time of an answer.
"""

from __future__ import annotations

from megaprof.analysis.samples import CERTAIN as CERTAIN
from megaprof.analysis.table.table import QUARTILE as QUARTILE
from megaprof.parallel.peers import MINOR as MINOR

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
#: Something explains a difference, or is present in a step, from this part of it on.
MOST = 0.5
#: How many terms are mended together at most to find those that hide each other.
TOGETHER = 6
#: No prediction is more certain than this, as a fraction of the step: runs of one layout or packing, in turns with
#: others, differ by as much (`make bench-whatif`: 1 to 3 %), and a single run does not show it.
RERUN = 0.02
#: How much a different number of chunks may cost beyond its layers, as a fraction of the step. In a published pair of
#: GPU runs, the last stage became 3 % slower with two chunks.
OTHER_CHUNKS = 0.03
#: Standard error of what a single step gains by another packing, as a fraction of it: other steps have other sequences.
OTHER_SEQUENCES = 0.5
#: Kinds of layers whose costs cannot be separated differ by up to this factor.
KINDS_DIFFER = 2.0
