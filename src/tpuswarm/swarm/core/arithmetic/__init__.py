"""What becomes of arrays, in float32: fragments, quantization, the merge, the outer step, adoption."""
