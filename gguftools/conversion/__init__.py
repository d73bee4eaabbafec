"""From Hugging Face folders to GGUF: `run.py` does it, `hf.py` reads the config, `vocab.py` the tokenizer, `card.py`
and `names.py` what the model is called, `transforms.py` holds what happens to tensors."""
