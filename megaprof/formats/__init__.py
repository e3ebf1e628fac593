"""Everything that is written by one side and read by the other: names, ranges, metadata, the timeline file."""
