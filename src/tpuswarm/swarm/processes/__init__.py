"""The coordinator and the aggregators, as generators of effects; what a run is."""
