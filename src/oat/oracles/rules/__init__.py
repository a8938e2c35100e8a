"""Rules: rewards that a program works out from the text alone."""
