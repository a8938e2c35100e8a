"""The way from messages to tokens, and from tokens to text."""
