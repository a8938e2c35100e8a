"""The commands, one file for each: its arguments and its work. The other files are shared by several
commands, or do a part of one command's work."""
