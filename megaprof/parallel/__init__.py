"""Where a rank stands: its coordinates, its machine, which ranks are meant, what a model chunk consists of."""
