"""Find what makes a run slow or silently wrong, and where its time goes."""
