"""What a model needs before anything runs: memory per NPU, from the model's configuration alone."""
