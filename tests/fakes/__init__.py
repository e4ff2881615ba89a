"""Stand-ins that tests of the cluster share."""
