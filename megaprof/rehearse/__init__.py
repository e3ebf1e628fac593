"""One stage of a job after another on one device, and what they say about the whole pipeline.

Nothing else of megaprof imports this room, except its command.
"""
