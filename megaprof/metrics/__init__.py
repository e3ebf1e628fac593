"""Figures of a running job, from the status files of its ranks, for people and for the dashboards that they have."""
