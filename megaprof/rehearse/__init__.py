"""One stage of a job after another on one device, and what they say about the whole pipeline."""
