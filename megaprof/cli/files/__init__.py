"""Commands that answer from files of captures: reports, comparisons, predictions, other formats, and pages."""
