"""Facts about TPUs as data (TOML with source and date), and typed look-ups on it."""
