"""Schedule orders, simulation, layouts, cost model, candidates."""
