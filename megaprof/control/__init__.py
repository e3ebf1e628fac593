"""Control of a running job by files: what it is doing, and captures that are asked for while it runs.

All files are in ``control/`` below the save directory (docs/on-demand.md). The background thread of each rank writes
the rank's status and looks for a request. Nothing listens on a port, and the training thread reads one attribute per
step.
"""
