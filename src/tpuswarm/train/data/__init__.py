"""From a source's rows to arrays on the devices of one host or several."""
