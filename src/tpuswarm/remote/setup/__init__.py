"""Set machines up in steps, each with a check, and a stamp on the machine once it is done."""
