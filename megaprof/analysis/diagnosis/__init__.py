"""One diagnosis from one table of passes: causes are terms of a model of the step, priced by replays without them."""
