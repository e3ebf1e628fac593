"""Control of a running job by files: what it is doing, and captures that are asked for while it runs.

Everything lies in ``control/`` below the save directory (docs/on-demand.md). Each rank's background thread writes its
own status and looks for orders; nothing listens on a port, and the training thread reads one attribute per step.
"""
