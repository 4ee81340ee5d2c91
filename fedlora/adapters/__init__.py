"""PEFT bridge: find layers, inject, read, write, fingerprint; shared lora_A recipe."""
