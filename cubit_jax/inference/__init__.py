"""What a model is used for once it has parameters: held-out loss and text."""
