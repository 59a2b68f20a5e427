"""Read rows of a source and place them on the devices of one host or several."""
