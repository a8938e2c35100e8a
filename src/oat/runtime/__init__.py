"""The link between actor and learner, and the transfer of new weights to engines."""
