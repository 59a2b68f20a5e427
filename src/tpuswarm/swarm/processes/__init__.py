"""The coordinator's and the aggregators' processes, as generators that any engine can run."""
