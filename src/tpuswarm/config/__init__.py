"""Read what people write: counts, durations, TOML files; suggest the nearest valid name in errors."""
