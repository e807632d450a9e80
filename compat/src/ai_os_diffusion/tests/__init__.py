"""The test run over every available back end that the documents name."""
