"""One step of a forecast in plain torch: the model made ready, its cache of keys and values, ids, draws."""
