"""Everything that one side writes and the other reads: names of files and ranges, metadata, timelines, a job's control
directory; and how files are found and read."""
