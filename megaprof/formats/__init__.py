"""Everything that is written by one side and read by the other: names, ranges, codes, the timeline file."""
