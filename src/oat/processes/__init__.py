"""Processes beside this one: started, called, limited and ended."""
