"""What a person looks at: the live view, the state of a run, its events, its commits, its report."""
