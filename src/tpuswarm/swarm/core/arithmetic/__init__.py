"""Arithmetic on float32 arrays: fragments, quantization, the merge, the outer step, adoption."""
