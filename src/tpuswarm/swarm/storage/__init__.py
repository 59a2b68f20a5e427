"""Store a run's ledger and arrays, verify them, and delete old ones. Files never change in place."""
