"""A language model's whole generation in one call: the token loop runs where the weights are."""
