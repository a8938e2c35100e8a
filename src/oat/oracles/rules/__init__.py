"""Rules: rewards that a program computes from the text alone."""
