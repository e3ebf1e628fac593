"""Schedules replayed from plain times: many steps at once, or one."""
