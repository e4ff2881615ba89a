"""What the nodes of a fleet have, and how they are wired."""
