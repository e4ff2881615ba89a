"""How many engines a model deployment has, decided from its load."""
