"""What makes a run slow or silently wrong, found and said in words: one small file for each thing that can be wrong."""
