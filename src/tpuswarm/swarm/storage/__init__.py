"""What must last, and what proves it: nothing here is ever changed in place."""
