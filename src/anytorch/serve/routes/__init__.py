"""The end points, one small file per job. They translate; engines decide and compute."""
