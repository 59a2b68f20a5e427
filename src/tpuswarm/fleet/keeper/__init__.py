"""Run the loop that observes a fleet, decides and acts."""
