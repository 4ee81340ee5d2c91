"""fedlora: private federated fine-tuning of transformer models with LoRA."""

__version__ = "0.1.0"
