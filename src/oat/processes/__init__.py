"""Processes beside this one, here or on a Ray cluster: started, called, limited and ended."""
