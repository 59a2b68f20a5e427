"""Store the document of a fleet, and find fleets."""
