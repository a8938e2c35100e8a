"""What the machine is, and how its memory and threads are used."""
