"""Reading what was captured: traces and timelines to stage metrics, advice and reports. Training imports none of it."""
