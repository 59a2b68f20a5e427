"""What a fleet decides: values in, values out. No input or output, no clock, no threads."""
