"""`npufleet doctor`: is a machine, or every node of a cluster, ready to serve, and what to do where it is not."""
