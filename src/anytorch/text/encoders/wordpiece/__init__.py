"""BERT's tokenizer in C++: the same ids as Hugging Face's Rust one, many times faster; no torch."""
