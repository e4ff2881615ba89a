"""Going on with a streamed answer on another engine, from the tokens that its client already has."""
