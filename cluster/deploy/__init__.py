"""Changes of a running fleet: what it shall be, what a change means, and the commands for it."""
