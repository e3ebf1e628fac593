"""Scalars of a running job, from the status files of its ranks, for the dashboards that people look at anyway."""
